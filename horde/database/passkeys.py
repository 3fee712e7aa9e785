# SPDX-License-Identifier: AGPL-3.0-or-later
"""Passkeys of service accounts, which tell for which client they ask.

Source: docs/reference/accounts.md.
"""

import hmac
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from horde.classes.base.user import User, UserRole, UserRoleTypes
from horde.db import after_commit, transaction
from horde.exceptions import ServiceUnavailable
from horde.runtime import Part

PASSKEY_REFRESH_SECONDS = 5.0
PASSKEY_BYTES = 12  # 16 characters, the length the published description fixes


@dataclass(slots=True)
class PasskeyState:
    """The passkeys as this runtime last read them."""

    passkeys: tuple[bytes, ...] = ()
    read_at: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


state = Part(PasskeyState)


def generate_proxy_passkey(session: Session, user_id: int) -> str:
    """Give a service account a new passkey, which ends the old one; returns it. Other processes
    learn it within seconds.
    """
    passkey = secrets.token_urlsafe(PASSKEY_BYTES)
    session.execute(
        update(User)
        .where(User.id == user_id)
        .values(proxy_passkey=passkey)
        .execution_options(synchronize_session=False)
    )
    after_commit(session, forget_passkeys)
    return passkey


def resolve_client_address(
    peer: str, proxied_for: str | None, proxy_authorization: str | None
) -> str:
    """The address limits apply to: `proxied_for` when the passkey is that of a service account,
    else the peer.

    An edge of its own: it reads the passkeys, in a transaction, at most every few seconds and only
    for requests that bring one. While the database is away the passkeys read last still count.
    """
    if not proxied_for or not proxy_authorization or not _is_known_passkey(proxy_authorization):
        return peer
    try:
        return str(ip_address(proxied_for.strip().partition("%")[0]))
    except ValueError:
        return peer


def list_proxy_passkeys(session: Session) -> list[str]:
    """The passkeys of service accounts that are neither flagged nor deleted."""
    held = exists().where(UserRole.user_id == User.id, UserRole.value.is_(True))
    barred = (UserRoleTypes.FLAGGED, UserRoleTypes.DELETED)
    return list(
        session.scalars(
            select(User.proxy_passkey).where(
                User.proxy_passkey.is_not(None),
                held.where(UserRole.user_role == UserRoleTypes.SERVICE),
                ~held.where(UserRole.user_role.in_(barred)),
            )
        )
    )


def _is_known_passkey(passkey: str) -> bool:
    given = passkey.encode()
    # Each passkey is compared, in constant time: how long it takes tells nothing of which matched.
    return any([hmac.compare_digest(given, known) for known in _read_passkeys()])  # noqa: C419


def _read_passkeys() -> tuple[bytes, ...]:
    held = state.get()
    with held.lock:
        now = time.monotonic()
        read_at = held.read_at
        if read_at is None or now - read_at >= PASSKEY_REFRESH_SECONDS:
            held.read_at = now
            with suppress(ServiceUnavailable), transaction() as session:
                held.passkeys = tuple(passkey.encode() for passkey in list_proxy_passkeys(session))
        return held.passkeys


def forget_passkeys() -> None:
    """Read them again at the next request that brings one."""
    state.get().read_at = None
