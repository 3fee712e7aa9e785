# SPDX-License-Identifier: AGPL-3.0-or-later
"""The periodic jobs that are built of actions, and the list of all of them.

Source: docs/reference/background-jobs.md.
"""

from functools import partial

from horde import clock
from horde.actions.dashboard import measure_horde, store_tally
from horde.actions.evidence import expire_evidence, store_evidence
from horde.actions.statistics import compile_text_stats
from horde.config import Config
from horde.database import threads
from horde.database.monthly_kudos import ACCOUNTS_A_BATCH, pay_due_monthly_kudos
from horde.database.threads import PeriodicJob
from horde.db import run_transaction


def list_jobs(config: Config) -> list[PeriodicJob]:
    """Every periodic job of a process with these settings."""
    return [
        *threads.list_jobs(config),
        PeriodicJob("monthly_kudos", 3600.0, pay_monthly_kudos),
        PeriodicJob("text_stats", 10.0, compile_text_stats),
        PeriodicJob("tally", 15.0, store_tally, leader_only=False),
        PeriodicJob("figures", 30.0, measure_horde),
        PeriodicJob("evidence", 5.0, store_evidence),
        PeriodicJob("evidence_expiry", 60.0, partial(expire_evidence, config)),
    ]


def pay_monthly_kudos() -> None:
    """Pay every account whose month is over."""
    while run_transaction(lambda session: pay_due_monthly_kudos(session, clock.utcnow())) == (
        ACCOUNTS_A_BATCH
    ):
        pass
