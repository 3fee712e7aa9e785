# SPDX-License-Identifier: AGPL-3.0-or-later
"""What follows when a prompt was refused by moderation: points, and timeouts for who goes on.

Source: docs/explanation/countermeasures.md, "Refused prompts".
"""

from horde.classes.base.suspicion import Suspicion
from horde.config import Config
from horde.database.addresses import (
    count_address_rejection,
    count_proxied_rejection,
    punish_address,
)
from horde.database.stats import get_horde_modes
from horde.database.suspicions import add_user_suspicion
from horde.database.users import find_generate_caller
from horde.db import reading, run_transaction
from horde.notices import NoticeKind, queue_notice

PROXIED_REJECTIONS_AN_HOUR = 10  # of one service, before the moderators are told


def report_prompt_rejection(
    api_key: str, *, address: str, is_proxied: bool, config: Config
) -> None:
    """Count a refused prompt against who sent it; moderators, who try things out, are exempt.

    Nothing is kept of the prompt. Call it with no transaction open.
    """
    with reading() as session:
        caller = find_generate_caller(session, api_key)
        is_raid = get_horde_modes(session).raid
    if caller is None or caller.is_moderator:
        return
    run_transaction(
        lambda session: add_user_suspicion(session, caller.id, Suspicion.CORRUPT_PROMPT)
    )
    if is_proxied:
        # Its clients are many: the service is told of, and who is behind it is its business.
        if count_proxied_rejection(caller.id) == PROXIED_REJECTIONS_AN_HOUR + 1:
            queue_notice(
                NoticeKind.PROBLEM_USER,
                f"More than {PROXIED_REJECTIONS_AN_HOUR} prompts that user {caller.id} sent for"
                " others were refused within an hour.",
            )
        return
    rejections = count_address_rejection(address)
    if rejections and (is_raid or rejections > config.rejection_timeout_threshold):
        punish_address(address)
