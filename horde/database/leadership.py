# SPDX-License-Identifier: AGPL-3.0-or-later
"""The lock of whoever runs the leader's jobs: held by a session, and gone with it."""

from sqlalchemy import Connection, text

LEADER_LOCK = 0x686F7264_6C640001  # of this database's advisory locks; any number nobody else uses
# A server that stopped writing has been replaced by another one, whose lock somebody else may have.
_WRITES = "current_setting('transaction_read_only') = 'off'"
_TAKE_LOCK = text(f"SELECT CASE WHEN {_WRITES} THEN pg_try_advisory_lock(:key) ELSE false END")
# The lock is looked for and not taken for granted: a pooler may have given this session another
# server process.
_HOLDS_LOCK = text(
    f"""
    SELECT {_WRITES} AND EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND objsubid = 1
            AND (classid::bigint << 32) | objid::bigint = :key
    )
    """
)


def take_leader_lock(connection: Connection) -> bool:
    """Whether the session got the lock that nobody has."""
    return bool(connection.scalar(_TAKE_LOCK, {"key": LEADER_LOCK}))


def holds_leader_lock(connection: Connection) -> bool:
    """Whether the session still has the lock, on a server that still writes."""
    return bool(connection.scalar(_HOLDS_LOCK, {"key": LEADER_LOCK}))
