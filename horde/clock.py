# SPDX-License-Identifier: AGPL-3.0-or-later
"""The wall clock, in one place so that tests can move it."""

from datetime import UTC, datetime


def utcnow() -> datetime:
    """Now as naive UTC, the form in which every timestamp is stored."""
    return datetime.now(UTC).replace(tzinfo=None)
