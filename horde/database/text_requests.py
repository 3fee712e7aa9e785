# SPDX-License-Identifier: AGPL-3.0-or-later
"""Storing text and chat requests: what admission asks, the inactive row with its hold, the
activation, the cancel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cache, partial
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    CTE,
    Insert,
    Integer,
    Select,
    Table,
    Text,
    Uuid,
    any_,
    bindparam,
    cast,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from horde.chat.wire import ChatExtras, Message
from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import ANONYMOUS_ID
from horde.classes.base.waiting_prompt import REQUEST_TTL, WPAllowedWorkers, WPModels
from horde.classes.base.worker import Worker
from horde.classes.kobold.pricing import build_activation_movements
from horde.classes.kobold.queue_class import compute_queue_class
from horde.classes.kobold.waiting_prompt import (
    OperationKeyClaim,
    TextWaitingPrompt,
    build_sent_columns,
    delete_stored_chat_images,
)
from horde.classes.kobold.worker import RequestNeeds
from horde.database.kudos import release_hold
from horde.database.queue_classes import TEXT_FAMILY, is_live
from horde.database.request_endings import delete_requests, mark_cancelled
from horde.database.styles import FoundStyle, count_use
from horde.database.users import Caller, charge_shared_key
from horde.db import after_commit, execute_later, table_of
from horde.exceptions import NotFound, TooManyRequests
from horde.hot_session import keep
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.shapes.text_params import TextParams

DOWNGRADED_PRIORITY = -50
HIGHEST_PRIORITY = 2**31 - 1  # what the column holds; balances are wider
FLAGGED_PRIORITY = -100
FLAGGED_DIVISOR = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContent:
    """What a text or chat request asks for, as it is stored. `prompt` is what is left after
    moderation and trimming.
    """

    prompt: str
    submitted_prompt: str
    params: TextParams
    gen_payload: TextParams
    n: int = 1
    worker_ids: tuple[UUID, ...] = ()
    style_id: UUID | None = None
    proxied_account: str | None = None
    webhook: str | None = None
    softprompt: str | None = None  # this and the next two are kept, and change nothing on text
    extra_slow_workers: bool = False
    disable_batching: bool = False
    messages: list[Message] | None = None
    chat_extras: ChatExtras | None = None
    context_adjustments: list[JsonObject] | None = None
    conformance: str = "strict"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTextRequest:
    """A text or chat request about to be stored: its content, who may serve it, who sent it and
    what it should cost.
    """

    content: RequestContent
    needs: RequestNeeds
    quote: int  # whole kudos, as the 202 tells it
    ipaddr: str
    client_agent: str
    sharedkey_id: UUID | None = None
    sender: Caller | None = None  # where it is not the account that pays

    @property
    def sender_columns(self) -> JsonObject:
        """Who sent it, as it is stored."""
        sender = self.sender
        sharedkey = None if sender is None else sender.sharedkey
        return {
            "sender_id": None if sender is None else sender.id,
            "sender_sharedkey_id": None if sharedkey is None else sharedkey.id,
        }


requests, wanted_models, targets = (
    table_of(TextWaitingPrompt),
    table_of(WPModels),
    table_of(WPAllowedWorkers),
)


def _build_count_waiting(*, of_models: bool) -> Select[Any]:
    """Waiting generations of an account, counted no further than the limit: each row stands for one
    at least.
    """
    rows = select(requests.c.n).where(
        is_live(requests.c),
        requests.c.wp_type == TEXT_FAMILY,
        requests.c.user_id == bindparam("user_id"),
    )
    if of_models:
        is_named = wanted_models.c.model == any_(cast(bindparam("models"), ARRAY(Text)))
        rows = rows.join_from(
            requests, wanted_models, wanted_models.c.wp_id == requests.c.id
        ).where(is_named)
    counted = rows.limit(bindparam("limit", type_=Integer)).subquery()
    return select(func.coalesce(func.sum(counted.c.n), 0))


_COUNT_WAITING = keep(_build_count_waiting(of_models=False))
_COUNT_WAITING_FOR_MODELS = keep(_build_count_waiting(of_models=True))


def require_worker_ids(session: Session, worker_ids: Sequence[str]) -> tuple[UUID, ...]:
    """The listed workers' ids, in one statement; raises NotFound naming the first that does not
    exist.
    """
    parsed: list[UUID] = []
    for text in worker_ids:
        try:
            worker_id = UUID(text)
        except ValueError:
            raise _worker_missing(text) from None
        if str(worker_id) != text.lower():  # the other spellings that Python reads are none of ours
            raise _worker_missing(text)
        parsed.append(worker_id)
    if not parsed:
        return ()
    existing = set(session.scalars(select(Worker.id).where(Worker.id.in_(parsed))))
    for worker_id in parsed:
        if worker_id not in existing:
            raise _worker_missing(str(worker_id))
    return tuple(dict.fromkeys(parsed))


def _worker_missing(worker_id: str) -> NotFound:
    return NotFound(
        f"Worker with ID '{worker_id[:64]}' does not exist.", ReturnCode.WORKER_NOT_FOUND
    )


def count_waiting_generations(
    session: Session, user_id: int, models: Sequence[str], *, limit: int
) -> int:
    """Generations of a user's text and chat requests still to be handed out; beyond `limit` it
    stops counting.

    Anonymous with a model list counts those naming any of the models, once for each matching name:
    its allowance holds for each group of models, or one busy model would close the horde to
    everybody without an account.
    """
    if user_id == ANONYMOUS_ID and models:
        values = {"user_id": user_id, "models": list(models), "limit": limit + 1}
        return int(session.scalar(_COUNT_WAITING_FOR_MODELS, values) or 0)
    return int(session.scalar(_COUNT_WAITING, {"user_id": user_id, "limit": limit + 1}) or 0)


def check_concurrency(session: Session, caller: Caller, n: int, models: Sequence[str]) -> None:
    """Refuse more waiting generations than an account may have; raises TooManyRequests."""
    waiting = count_waiting_generations(session, caller.id, models, limit=caller.concurrency)
    if waiting + n <= caller.concurrency:
        return
    if caller.is_anonymous:
        message = (
            f"Too many anonymous requests are waiting ({waiting} of {caller.concurrency}). "
            "Register an account for an allowance of your own, or try again later."
        )
    else:
        message = (
            f"Parallel requests ({waiting} + {n}) above the limit of {caller.concurrency} for user"
            f" {caller.alias}."
        )
    raise TooManyRequests(message, ReturnCode.TOO_MANY_PROMPTS)


def insert_text_request(session: Session, wp_id: UUID, new: NewTextRequest, now: datetime) -> None:
    """Write the inactive row with its models and worker list; no worker sees it before the
    activation.
    """
    needs, content = new.needs, new.content
    columns = {
        "id": wp_id,
        "wp_type": TEXT_FAMILY,
        "prompt": content.prompt,
        "submitted_prompt": content.submitted_prompt,
        "user_id": needs.user_id,
        "params": content.params,
        "gen_payload": content.gen_payload,
        "nsfw": needs.nsfw,
        "ipaddr": new.ipaddr,
        "safe_ip": True,
        "trusted_workers": needs.trusted_workers,
        "validated_backends": needs.validated_backends,
        "slow_workers": needs.slow_workers,
        "worker_blacklist": needs.worker_blacklist,
        "faulted": False,
        "active": False,
        "consumed_kudos": 0,
        "kudos": new.quote,
        "extra_priority": 0,
        "n": content.n,
        "jobs": content.n,
        "things": needs.max_length,
        "total_usage": needs.max_length * content.n,
        "webhook": content.webhook,
        "softprompt": content.softprompt,
        "extra_slow_workers": content.extra_slow_workers,
        "disable_batching": content.disable_batching,
        "client_agent": new.client_agent,
        "sharedkey_id": new.sharedkey_id,
        **new.sender_columns,
        "style_id": content.style_id,
        "proxied_account": content.proxied_account,
        "expiry": now + REQUEST_TTL,
        "created": now,
        "queue_class": compute_queue_class(needs),
        "max_length": needs.max_length,
        "max_context_length": needs.max_context_length,
        "is_chat": needs.is_chat,
        **build_sent_columns(content.messages, content.chat_extras),
        "context_adjustments": content.context_adjustments,
        "chat_required_features": sorted(needs.required_features) if needs.is_chat else None,
        "chat_conformance": content.conformance,
        "chat_messages_offloaded": False,
        "chat_tools_temperature": needs.tools_temperature,
    }
    lists = {
        "of_request": wp_id,
        "listed_models": list(needs.models),
        "listed_workers": list(content.worker_ids),
    }
    execute_later(session, _build_insert(tuple(columns)), columns | lists)


@cache
def _build_insert(names: tuple[str, ...]) -> Insert:
    """The insert of a request with these columns, its models and its workers, as one statement.

    Beside the other inserts no column gets the default of its class, so each is named.
    """
    row = {name: bindparam(name, type_=requests.c[name].type) for name in names}
    of_models = _build_insert_of_list(wanted_models, "model", "listed_models", Text)
    of_workers = _build_insert_of_list(targets, "worker_id", "listed_workers", Uuid)
    return keep(insert(requests).values(row).add_cte(of_models, of_workers))


def _build_insert_of_list(table: Table, name: str, parameter: str, kind: type[Any]) -> CTE:
    """The insert of one row for each entry of a list, in its order."""
    listed = (
        func.unnest(cast(bindparam(parameter), ARRAY(kind)))
        .table_valued(name, with_ordinality="place")
        .render_derived()
    )
    of_request = bindparam("of_request", type_=Uuid)
    entries = select(of_request, listed.c[name]).order_by(listed.c.place)
    return insert(table).from_select(["wp_id", name], entries).cte(f"insert_{parameter}")


def compute_starting_priority(caller: Caller, *, is_downgraded: bool) -> int:
    """Where a request enters the queue: the requester's folded kudos, less for downgraded and
    flagged accounts.
    """
    if is_downgraded:
        return DOWNGRADED_PRIORITY
    if not caller.is_flagged:
        priority = caller.kudos
    else:
        priority = round(caller.kudos / FLAGGED_DIVISOR) if caller.kudos > 10 else FLAGGED_PRIORITY
    return max(-HIGHEST_PRIORITY, min(priority, HIGHEST_PRIORITY))


def activate_text_request(
    session: Session,
    wp_id: UUID,
    *,
    caller: Caller,
    sharedkey_id: UUID | None,
    tax: Decimal,
    priority: int,
    claim: OperationKeyClaim | None,
    style: FoundStyle | None = None,
    now: datetime,
) -> bool:
    """Show a request to the workers and charge its tax, in the caller's transaction; False when the
    row is gone.
    """
    author_id = style.author_id if style is not None and style.author_id != caller.id else None
    movements = build_activation_movements(
        requester_id=caller.id, tax=tax, style_author_id=author_id
    )
    if not TextWaitingPrompt._activate(
        session,
        wp_id,
        tax=int(tax),
        priority=priority,
        claim=claim,
        movements=movements,
        now=now,
    ):
        return False
    if sharedkey_id is not None:
        charge_shared_key(session, sharedkey_id, tax)
    if style is not None:
        count_use(session, style, now)
    return True


def mark_messages_offloaded(session: Session, wp_id: UUID) -> None:
    """Note on a request that its messages are one object too, before that is stored: then the
    object goes with the row.
    """
    session.execute(
        update(requests).where(requests.c.id == wp_id).values(chat_messages_offloaded=True)
    )


def delete_inactive_request(
    session: Session, wp_id: UUID, now: datetime, *, object_keys: Sequence[str] | None = None
) -> None:
    """Take back a request that was never shown: its row and its hold, then its objects, as if it
    had not been sent. One that workers see is left alone.

    `object_keys` are those that may be stored, when that is not all the row names.
    """
    named_by_row = None if object_keys is None else ()
    delete_requests(session, [wp_id], only_inactive=True, object_keys=named_by_row)
    if session.scalar(select(requests.c.id).where(requests.c.id == wp_id)) is not None:
        return
    release_hold(session, upfront_hold_id(wp_id), now)
    if object_keys:
        after_commit(session, partial(delete_stored_chat_images, list(object_keys)))


def cancel_text_request(session: Session, wp_id: UUID, now: datetime) -> bool:
    """Cancel a request; True for the one call that did it. Its hold ends with its last job, at once
    when none runs.
    """
    if not mark_cancelled(session, wp_id, now):
        return False
    release_hold_when_idle(session, wp_id, now)
    return True


def release_hold_when_idle(session: Session, wp_id: UUID, now: datetime) -> None:
    """End the hold of a request that hands out nothing more, unless a worker still holds a job of
    it.
    """
    if not has_pending_jobs(session, wp_id):
        release_hold(session, upfront_hold_id(wp_id), now)


def has_pending_jobs(session: Session, wp_id: UUID) -> bool:
    """Whether a worker still holds a job of the request; fakes never count."""
    job = ProcessingGeneration
    pending = (
        select(job.id)
        .where(job.wp_id == wp_id, job.generation.is_(None), ~job.faulted, ~job.fake)
        .limit(1)
    )
    return session.scalar(pending) is not None
