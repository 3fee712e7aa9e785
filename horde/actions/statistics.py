# SPDX-License-Identifier: AGPL-3.0-or-later
"""Statistics of text: read from sums, which a periodic job keeps."""

from dataclasses import asdict
from functools import partial

from horde import clock
from horde.database.caches import TimedCache, write_answer
from horde.database.text_stats import (
    add_queued_stats,
    add_recorded_stats,
    get_text_model_counts,
    get_text_totals,
    prune_stat_spans,
)
from horde.db import reading, run_transaction
from horde.shapes.statistics import SinglePeriodTxtStat, StatsTxtTotals, TxtModelStats
from horde.written_answer import WrittenAnswer

ANSWER_SECONDS = 50.0
QUEUED_A_BATCH = 5000
RECORDED_A_BATCH = 20_000  # a fraction of a second
BACKFILL_BATCHES_A_RUN = 20

_totals = TimedCache[None, WrittenAnswer](ANSWER_SECONDS)
_models = TimedCache[None, WrittenAnswer](ANSWER_SECONDS)


def show_text_totals() -> WrittenAnswer:
    """What ended within the last minute, hour, day and 30 days, and in all time; up to a minute
    old.
    """
    return _totals.get(None, _read_totals)


def show_text_models() -> WrittenAnswer:
    """Ended jobs by model; up to a minute old."""
    return _models.get(None, _read_models)


def _read_totals() -> WrittenAnswer:
    with reading() as session:
        sums = get_text_totals(session, clock.utcnow())
    totals = {name: SinglePeriodTxtStat(**asdict(period)) for name, period in sums.items()}
    return write_answer(StatsTxtTotals(**totals).dump())


def _read_models() -> WrittenAnswer:
    with reading() as session:
        counts = get_text_model_counts(session, clock.utcnow())
    return write_answer(TxtModelStats.model_validate(counts).dump())


def compile_text_stats() -> None:
    """Add what ended to the sums, and drop the sums that nobody reads any more."""
    now = clock.utcnow()
    add = partial(add_queued_stats, now=now, batch=QUEUED_A_BATCH)
    while run_transaction(add) == QUEUED_A_BATCH:
        pass
    add_older = partial(add_recorded_stats, now=now, batch=RECORDED_A_BATCH)
    for _ in range(BACKFILL_BATCHES_A_RUN):
        if not run_transaction(add_older):
            break
    run_transaction(partial(prune_stat_spans, now=now))
