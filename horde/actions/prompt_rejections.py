# SPDX-License-Identifier: AGPL-3.0-or-later
"""What follows when a prompt was refused by moderation: evidence, points, and timeouts for who goes
on.

Source: docs/explanation/countermeasures.md, "Refused prompts".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from horde.actions.evidence import keep_event
from horde.classes.base.moderation import ModerationReason
from horde.classes.base.suspicion import Suspicion
from horde.config import Config
from horde.database.addresses import (
    count_address_rejection,
    count_proxied_rejection,
    punish_address,
)
from horde.database.evidence import NewEvent, Prompts
from horde.database.stats import get_horde_modes
from horde.database.suspicions import add_user_suspicion
from horde.database.users import find_generate_caller
from horde.db import reading, run_transaction
from horde.notices import NoticeKind, queue_notice

PROXIED_REJECTIONS_AN_HOUR = 10  # of one service, before the moderators are told


@dataclass(frozen=True, slots=True)
class RejectedPrompt:
    """A prompt that was refused, and what it was for."""

    reason: ModerationReason
    models: Sequence[str] = field(kw_only=True)
    is_chat: bool = field(kw_only=True)
    proxied_account: str | None = field(kw_only=True)
    prompts: Prompts = field(kw_only=True, repr=False)


def report_prompt_rejection(
    api_key: str, rejected: RejectedPrompt, *, address: str, is_proxied: bool, config: Config
) -> None:
    """Count a refused prompt against who sent it, and keep it; moderators, who try things out, are
    exempt.

    Call it with no transaction open.
    """
    with reading() as session:
        caller = find_generate_caller(session, api_key)
        is_raid = get_horde_modes(session).raid
    if caller is None or caller.is_moderator:
        return
    run_transaction(
        lambda session: add_user_suspicion(session, caller.id, Suspicion.CORRUPT_PROMPT)
    )
    rejections = (
        count_proxied_rejection(caller.id) if is_proxied else count_address_rejection(address)
    )
    event = NewEvent(
        reason=rejected.reason,
        user_id=caller.id,
        address=address,
        models=rejected.models,
        is_chat=rejected.is_chat,
        proxied_account=rejected.proxied_account,
        prompts=rejected.prompts,
    )
    keep_event(event, config, count=rejections)
    if is_proxied:
        # Its clients are many: the service is told of, and who is behind it is its business.
        if rejections == PROXIED_REJECTIONS_AN_HOUR + 1:
            queue_notice(
                NoticeKind.PROBLEM_USER,
                f"More than {PROXIED_REJECTIONS_AN_HOUR} prompts that user {caller.id} sent for"
                " others were refused within an hour.",
            )
        return
    if rejections and (is_raid or rejections > config.rejection_timeout_threshold):
        punish_address(address)
