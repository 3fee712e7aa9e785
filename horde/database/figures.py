# SPDX-License-Identifier: AGPL-3.0-or-later
"""Figures of the horde by the minute: stored as they come, kept for a day, read as series.

Amounts of one minute are added up, whichever process counted them. Two writers of the same rows
write them in the order of their names, so neither waits for the other in a circle.
"""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from sqlalchemy import Executable, delete, text
from sqlalchemy.orm import Session

from horde.classes.base.figures import FAULT_REASON_LENGTH, FIGURE_NAME_LENGTH, Figure
from horde.classes.base.worker import online_since

KEPT = timedelta(hours=25)
LEDGER_ID = "ledger_id"  # the newest posting whose kudos are counted
GAINED, SPENT = "gained.", "spent."

type Amounts = Mapping[str, float]
type Minutes = dict[datetime, dict[str, float]]

_ADD = text(
    """
    INSERT INTO horde_figures AS stored (minute, name, amount)
    SELECT :minute, name, amount
    FROM unnest(CAST(:names AS text[]), CAST(:amounts AS float8[])) AS new (name, amount)
    ORDER BY name
    ON CONFLICT (minute, name) DO UPDATE SET amount = stored.amount + excluded.amount
    """
)
_SET = text(str(_ADD).replace("stored.amount + excluded.amount", "excluded.amount"))

# A worker may have been deleted meanwhile.
_ADD_FAULTS = text(
    """
    INSERT INTO worker_faults AS stored (worker_id, reason, faults, last_fault)
    SELECT worker_id, reason, faults, :now
    FROM unnest(CAST(:ids AS uuid[]), CAST(:reasons AS text[]), CAST(:faults AS bigint[]))
        AS new (worker_id, reason, faults)
    WHERE EXISTS (SELECT FROM workers WHERE workers.id = new.worker_id)
    ORDER BY worker_id, reason
    ON CONFLICT (worker_id, reason) DO UPDATE
    SET faults = stored.faults + excluded.faults, last_fault = excluded.last_fault
    """
)

_GAUGES = text(
    """
    SELECT
        (SELECT coalesce(sum(n), 0) FROM waiting_prompts
         WHERE active AND NOT faulted AND n > 0 AND expiry > :now) AS waiting,
        (SELECT count(*) FROM processing_gens
         WHERE generation IS NULL AND faulted IS false AND NOT fake) AS processing,
        (SELECT count(*) FROM workers WHERE last_check_in >= :online_since) AS workers,
        (SELECT count(*) FROM kudos_ledger WHERE applied IS false) AS unfolded
    """
)

# The postings since the last look, by the primary key. The first look begins with the newest.
_KUDOS = text(
    """
    WITH last_look AS (
        SELECT amount::bigint AS id FROM horde_figures
        WHERE name = :ledger_id ORDER BY minute DESC LIMIT 1
    )
    SELECT entry_type AS reason, max(id) AS newest,
        coalesce(sum(amount) FILTER (WHERE amount > 0 AND account = 'balance'), 0) AS gained,
        coalesce(-sum(amount) FILTER (WHERE amount < 0 AND account = 'balance'), 0) AS spent
    FROM kudos_ledger
    WHERE id > coalesce((SELECT id FROM last_look), (SELECT max(id) - 1 FROM kudos_ledger))
    GROUP BY entry_type
    """
)

_READ = text(
    """
    SELECT date_bin(CAST(:span AS interval), minute, timestamp 'epoch') AS start, name,
        sum(amount) AS total, count(*) AS minutes
    FROM horde_figures
    WHERE minute >= :since AND minute < :until AND name <> :ledger_id
    GROUP BY start, name
    """
)


class Gauge(StrEnum):
    """Figures that say how much there is, and not how often something happened."""

    WAITING = "waiting"
    PROCESSING = "processing"
    WORKERS = "workers"
    UNFOLDED = "unfolded"


def floor_minute(moment: datetime) -> datetime:
    """The minute that a moment lies in."""
    return moment.replace(second=0, microsecond=0)


def add_figures(session: Session, amounts: Amounts, now: datetime) -> None:
    """Add what happened to the figures of this minute."""
    _write(session, _ADD, amounts, now)


def add_worker_faults(
    session: Session, faults: Mapping[tuple[UUID, str], int], now: datetime
) -> None:
    """Add faults of workers, by worker and reason."""
    ordered = sorted(faults.items(), key=lambda item: (str(item[0][0]), item[0][1]))
    if ordered:
        values = {
            "ids": [str(worker_id) for (worker_id, _), _ in ordered],
            "reasons": [reason[:FAULT_REASON_LENGTH] for (_, reason), _ in ordered],
            "faults": [count for _, count in ordered],
            "now": now,
        }
        session.execute(_ADD_FAULTS, values)


def measure(session: Session, now: datetime) -> None:
    """Store how much there is of everything, and the kudos that moved since the last time."""
    row = session.execute(_GAUGES, {"now": now, "online_since": online_since(now)}).one()
    amounts = {gauge.value: float(getattr(row, gauge)) for gauge in Gauge}
    postings = session.execute(_KUDOS, {"ledger_id": LEDGER_ID}).all()
    if postings:
        amounts[LEDGER_ID] = float(max(posting.newest for posting in postings))
        moved = {GAINED + posting.reason: float(posting.gained) for posting in postings}
        moved |= {SPENT + posting.reason: float(posting.spent) for posting in postings}
        add_figures(session, {name: amount for name, amount in moved.items() if amount}, now)
    _write(session, _SET, amounts, now)


def prune(session: Session, now: datetime) -> None:
    """Drop what no view reaches any more. The newest mark of the ledger stays."""
    outdated = (Figure.minute < now - KEPT) & (Figure.name != LEDGER_ID)
    session.execute(delete(Figure).where(outdated).execution_options(synchronize_session=False))
    superseded = (Figure.name == LEDGER_ID) & (Figure.minute < floor_minute(now))
    newer = Figure.__table__.alias("newer")
    has_newer = (
        newer.select()
        .where(newer.c.name == LEDGER_ID, newer.c.minute > Figure.minute)
        .correlate(Figure.__table__)
        .exists()
    )
    session.execute(
        delete(Figure).where(superseded, has_newer).execution_options(synchronize_session=False)
    )


def read_figures(session: Session, *, since: datetime, until: datetime, span: timedelta) -> Minutes:
    """Figures by the start of a span of whole minutes: how often something happened a minute, and
    the mean of how much there was. Empty spans are left out.
    """
    found: Minutes = defaultdict(dict)
    minutes = span / timedelta(minutes=1)
    gauges = {gauge.value for gauge in Gauge}
    values = {"span": span, "since": since, "until": until, "ledger_id": LEDGER_ID}
    for start, name, total, count in session.execute(_READ, values):
        found[start][name] = total / (count if name in gauges else minutes)
    return found


def _write(session: Session, statement: Executable, amounts: Amounts, now: datetime) -> None:
    if not amounts:
        return
    names = sorted(amounts)
    session.execute(
        statement,
        {
            "minute": floor_minute(now),
            "names": [name[:FIGURE_NAME_LENGTH] for name in names],
            "amounts": [amounts[name] for name in names],
        },
    )
