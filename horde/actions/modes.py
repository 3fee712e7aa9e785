# SPDX-License-Identifier: AGPL-3.0-or-later
"""The switches of the whole horde: who sees them, who sets them, and what maintenance ends."""

from collections.abc import Mapping
from functools import partial

from sqlalchemy.orm import Session

from horde import chat_signal, clock
from horde.actions.actors import Actor, By, require_actor
from horde.actions.acts import record_act
from horde.chat_signal import ChatEvent
from horde.database.stats import (
    get_horde_modes,
    set_horde_modes,
    stop_waiting_requests,
)
from horde.database.users import find_caller
from horde.db import run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.modes import HordeModes, HordeModesInput


def show_modes(by: By | None) -> HordeModes:
    """The modes; raid mode for moderators alone. An unknown key sees what everybody sees."""
    with transaction() as session:
        modes = get_horde_modes(session)
        if isinstance(by, Actor):
            sees_raid = by.is_moderator
        else:
            caller = find_caller(session, by)
            sees_raid = caller is not None and caller.is_moderator
    return HordeModes(
        maintenance_mode=modes.maintenance,
        invite_only_mode=modes.invite_only,
        raid_mode=modes.raid if sees_raid else None,
    )


def change_modes(by: By, body: HordeModesInput) -> HordeModes:
    """Set modes: maintenance as an admin, the others as a moderator; what was set.

    Errors: Unauthorized, Forbidden, BadRequest when nothing is to be set.
    """
    changes = body.model_dump(exclude_none=True, exclude={"reason"})

    def work(session: Session) -> None:
        actor = require_actor(session, by)
        _check_may_set_modes(actor, changes)
        set_horde_modes(
            session, {name.removesuffix("_mode"): value for name, value in changes.items()}
        )
        record_act(
            session, actor, ModeratorAction.MODES_CHANGED, "horde", body.reason, changes=changes
        )

    run_transaction(work)
    if body.maintenance_mode:
        _end_waiting_requests()
    return HordeModes(**changes)


def _check_may_set_modes(actor: Actor, changes: Mapping[str, bool]) -> None:
    """Refuse changes the actor may not make: Forbidden, or BadRequest when there are none."""
    if "maintenance_mode" in changes and not actor.is_admin:
        raise Forbidden(
            "Only an admin can set the maintenance mode of the horde.", ReturnCode.NOT_ADMIN
        )
    if changes.keys() - {"maintenance_mode"} and not actor.is_moderator:
        raise Forbidden(
            "Only a moderator can set this mode of the horde.", ReturnCode.NOT_MODERATOR
        )
    if not changes:
        raise BadRequest("No mode was selected.", ReturnCode.NO_HORDE_MOD_SELECTED)


def _end_waiting_requests() -> None:
    """End every waiting request, batch by batch, and tell those who wait for a chat request."""
    while True:
        stopped = run_transaction(partial(stop_waiting_requests, now=clock.utcnow()))
        if not stopped:
            return
        for ended in stopped:
            if ended.is_chat:
                chat_signal.publish_chat_event(ended.id, ChatEvent.CANCELLED, ended.generations)
