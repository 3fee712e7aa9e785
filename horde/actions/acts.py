# SPDX-License-Identifier: AGPL-3.0-or-later
"""Acts of moderators: recorded in the transaction that does them, and listed."""

from datetime import UTC
from email.utils import format_datetime

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_moderator
from horde.database import moderator_acts
from horde.database.moderator_acts import RecordedAct
from horde.db import reading
from horde.shapes.acts import ActsQuery, ModeratorActDetails, ModeratorAction

ACTS_A_PAGE = 50
MAX_SUBJECT_LENGTH = 255
OPERATOR_NAME = "operator"


def record_act(
    session: Session,
    actor: Actor,
    action: ModeratorAction,
    subject: str,
    reason: str | None = None,
    **details: object,
) -> None:
    """Record what the actor does; it stands when the caller's transaction does."""
    moderator_acts.add_act(
        session,
        user_id=actor.user_id,
        username=OPERATOR_NAME if actor.account is None else actor.account.alias,
        action=action,
        subject=subject[:MAX_SUBJECT_LENGTH],
        reason=reason,
        details=details,
        now=clock.utcnow(),
    )


def list_acts(by: By, query: ActsQuery) -> list[ModeratorActDetails]:
    """A page of what moderators did, for moderators."""
    with reading() as session:
        require_moderator(session, by)
        acts = moderator_acts.list_acts(
            session,
            user_id=query.user_id,
            action=query.action,
            subject=query.subject,
            offset=(query.page - 1) * ACTS_A_PAGE,
            limit=ACTS_A_PAGE,
        )
    return [_show(act) for act in acts]


def _show(act: RecordedAct) -> ModeratorActDetails:
    return ModeratorActDetails(
        id=act.id,
        created=format_datetime(act.created.replace(tzinfo=UTC)),
        user_id=act.user_id,
        username=act.username,
        action=act.action,
        subject=act.subject,
        reason=act.reason,
        details=dict(act.details),
    )
