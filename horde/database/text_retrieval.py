# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text requests as their requesters sent them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.waiting_prompt import WPAllowedWorkers, WPModels
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.queue_classes import TEXT_FAMILY
from horde.database.text_status import parse_request_id, request_not_found
from horde.database.users import Caller
from horde.db import table_of
from horde.exceptions import Forbidden
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode

requests = table_of(TextWaitingPrompt)
wanted_models, targets = table_of(WPModels), table_of(WPAllowedWorkers)

_KEPT_AS_SENT = (
    "params",
    "trusted_workers",
    "validated_backends",
    "slow_workers",
    "extra_slow_workers",
    "worker_blacklist",
    "disable_batching",
    "softprompt",
    "webhook",
    "proxied_account",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTextRequest:
    """A text request in the shape of its submission, and who sent it."""

    user_id: int
    sharedkey_id: UUID | None
    sender_id: int | None
    sender_sharedkey_id: UUID | None
    body: JsonObject

    def is_from(self, caller: Caller) -> bool:
        """Whether this key sent it, or is its owner's own key where a shared key did or paid."""
        is_paid_by_others = self.sender_id is not None
        sharedkey_id = self.sender_sharedkey_id if is_paid_by_others else self.sharedkey_id
        if caller.sharedkey is not None and caller.sharedkey.id != sharedkey_id:
            return False
        if caller.id == (self.sender_id if is_paid_by_others else self.user_id):
            return True
        return caller.id == self.user_id and caller.sharedkey is None


def _build_find_sent() -> Select[Any]:
    models = (
        select(func.array_agg(aggregate_order_by(wanted_models.c.model, wanted_models.c.id)))
        .where(wanted_models.c.wp_id == requests.c.id)
        .scalar_subquery()
    )
    workers = (
        select(func.array_agg(aggregate_order_by(targets.c.worker_id, targets.c.id)))
        .where(targets.c.wp_id == requests.c.id)
        .scalar_subquery()
    )
    return select(
        requests.c.user_id,
        requests.c.sharedkey_id,
        requests.c.sender_id,
        requests.c.sender_sharedkey_id,
        requests.c.submitted_prompt,
        *(requests.c[name] for name in _KEPT_AS_SENT),
        models.label("models"),
        workers.label("workers"),
    ).where(
        requests.c.id == bindparam("wp_id"),
        requests.c.wp_type == TEXT_FAMILY,
        requests.c.active,
        ~requests.c.is_chat,
        requests.c.expiry > bindparam("now"),
    )


_FIND_SENT = _build_find_sent()


def require_sent_text_request(
    session: Session, request_id: str, caller: Caller, now: datetime
) -> SentTextRequest:
    """A text request that the caller sent, in one statement; raises NotFound or Forbidden.

    The prompt is the one that was sent, before moderation. A row without it has none: the prompt
    that workers get is never shown in its place.
    """
    facts = {"wp_id": parse_request_id(request_id), "now": now}
    row = session.execute(_FIND_SENT, facts).one_or_none()
    if row is None:
        raise request_not_found(request_id)
    prompt = {} if row.submitted_prompt is None else {"prompt": row.submitted_prompt}
    sent = SentTextRequest(
        user_id=row.user_id,
        sharedkey_id=row.sharedkey_id,
        sender_id=row.sender_id,
        sender_sharedkey_id=row.sender_sharedkey_id,
        body={
            **prompt,
            "models": row.models or [],
            "workers": [str(worker_id) for worker_id in row.workers or ()],
            **{name: getattr(row, name) for name in _KEPT_AS_SENT},
        },
    )
    if not sent.is_from(caller):
        message = "This request was sent with another key."
        raise Forbidden(message, ReturnCode.NOT_REQUEST_OWNER)
    return sent
