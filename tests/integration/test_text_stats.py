# SPDX-License-Identifier: AGPL-3.0-or-later
"""Statistics of text: counted once each, by window and by model, without reading rows."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text

from devtools.services import ServiceAddresses
from horde.actions.statistics import compile_text_stats
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.text_stats import TextStatModel, TextStatQueue, TextStatTotal
from horde.clock import utcnow
from horde.database import caches
from horde.db import transaction
from tests.integration.api_horde import Api, own_api
from tests.integration.rows import empty_tables, make_user
from tests.integration.statements import noting_statements
from tests.integration.text_horde import KNOWN, SMALL, TextHorde

ZERO = {"requests": 0, "tokens": 0}


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "text_stats") as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_counted(api: Api) -> None:
    empty_tables("text_gen_stats, text_stat_queue, text_stat_totals, text_stat_models")
    with transaction() as session:
        session.execute(text("UPDATE text_stat_backfill SET next_id = 1, last_id = 0"))
    caches.clear_all()


def record(finished: datetime, model: str = KNOWN, tokens: int = 80, count: int = 1) -> None:
    """Let jobs have ended at a moment."""
    with transaction() as session:
        session.add_all(
            TextGenStatistic(
                finished=finished,
                created=finished,
                model=model,
                max_length=tokens,
                max_context_length=2048,
                prompt_length=10,
                state=TextGenState.OK,
            )
            for _ in range(count)
        )


def read(api: Api, path: str) -> Any:
    caches.clear_all()
    answer = api.get(path)
    assert answer.status_code == 200, answer.json
    return answer.json


def test_before_anything_was_counted_all_is_zero(api: Api) -> None:
    assert read(api, "/stats/text/totals") == dict.fromkeys(
        ("minute", "hour", "day", "month", "total"), ZERO
    )
    assert read(api, "/stats/text/models") == {"day": {}, "month": {}, "total": {}}


def test_a_served_job_is_counted_with_the_tokens_it_was_asked_for(api: Api) -> None:
    horde = TextHorde(api.app)
    _, asker = make_user()
    _, owner = make_user()
    horde.queue(asker, models=[KNOWN], params={"max_length": 64})
    job_id = horde.take_job(owner, "a counted worker")
    assert horde.submit(owner, job_id).status_code == 200
    compile_text_stats()
    totals = read(api, "/stats/text/totals")
    assert totals == {
        name: {"requests": 1, "tokens": 64} for name in ("minute", "hour", "day", "month", "total")
    }
    assert read(api, "/stats/text/models")["total"] == {KNOWN: 1}


def test_each_window_counts_what_ended_in_it(api: Api) -> None:
    now = utcnow()
    for number, age in enumerate(
        (
            timedelta(seconds=20),
            timedelta(minutes=30),
            timedelta(hours=20),
            timedelta(days=20),
            timedelta(days=400),
        )
    ):
        record(now - age, tokens=10**number)
    compile_text_stats()
    totals = read(api, "/stats/text/totals")
    assert {name: totals[name]["tokens"] for name in totals} == {
        "minute": 1,
        "hour": 11,
        "day": 111,
        "month": 1111,
        "total": 11111,
    }
    assert [totals[name]["requests"] for name in totals] == [1, 2, 3, 4, 5]


def test_models_are_counted_apart(api: Api) -> None:
    now = utcnow()
    record(now, KNOWN, count=3)
    record(now - timedelta(days=3), SMALL, count=2)
    record(now - timedelta(days=300), "gone")
    compile_text_stats()
    assert read(api, "/stats/text/models") == {
        "day": {KNOWN: 3},
        "month": {KNOWN: 3, SMALL: 2},
        "total": {KNOWN: 3, SMALL: 2, "gone": 1},
    }


def test_what_is_counted_is_counted_once(api: Api) -> None:
    record(utcnow(), count=7)
    compile_text_stats()
    compile_text_stats()
    record(utcnow(), count=2)
    compile_text_stats()
    assert read(api, "/stats/text/totals")["total"]["requests"] == 9
    with transaction() as session:
        assert session.scalar(select(func.count()).select_from(TextStatQueue)) == 0


@pytest.mark.race
def test_two_leaders_at_once_count_each_job_once(api: Api) -> None:
    for _ in range(10):
        record(utcnow(), count=20)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: compile_text_stats(), range(4)):
            pass
    assert read(api, "/stats/text/totals")["total"] == {"requests": 200, "tokens": 16_000}


def test_what_a_rolled_back_submit_recorded_is_not_counted(api: Api) -> None:
    def fail_after_recording() -> None:
        with transaction() as session:
            session.execute(
                text(
                    "INSERT INTO text_gen_stats (model, max_length, max_context_length,"
                    " prompt_length) VALUES ('a', 80, 2048, 1)"
                )
            )
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_recording()
    compile_text_stats()
    assert read(api, "/stats/text/totals")["total"] == ZERO


def test_what_was_recorded_before_an_upgrade_is_added_up_once(api: Api) -> None:
    now = utcnow()
    record(now, tokens=5, count=30)
    record(now - timedelta(days=100), tokens=7, count=30)
    with transaction() as session:  # as a database without the queue is upgraded
        session.execute(text("TRUNCATE text_stat_queue"))
        session.execute(
            text(
                "UPDATE text_stat_backfill SET next_id = (SELECT min(id) FROM text_gen_stats),"
                " last_id = (SELECT max(id) FROM text_gen_stats)"
            )
        )
    record(now, tokens=5)  # after the upgrade
    compile_text_stats()
    compile_text_stats()
    totals = read(api, "/stats/text/totals")
    assert totals["total"] == {"requests": 61, "tokens": 31 * 5 + 30 * 7}
    assert totals["month"] == {"requests": 31, "tokens": 31 * 5}


def test_sums_that_no_window_reaches_are_dropped_and_all_time_stays(api: Api) -> None:
    record(utcnow())
    compile_text_stats()
    with transaction() as session:
        session.execute(
            text(
                "UPDATE text_stat_totals SET start = start - interval '50 days' WHERE span_seconds"
                " > 0"
            )
        )
        session.execute(
            text(
                "UPDATE text_stat_models SET start = start - interval '50 days' WHERE span_seconds"
                " > 0"
            )
        )
    compile_text_stats()
    with transaction() as session:
        for table in (TextStatTotal, TextStatModel):
            assert list(session.scalars(select(table.span_seconds))) == [0]


def test_the_answers_read_sums_alone_in_one_statement_each(api: Api) -> None:
    record(utcnow(), count=5)
    compile_text_stats()
    caches.clear_all()
    with noting_statements() as seen:
        for _ in range(3):
            api.get("/stats/text/totals")
            api.get("/stats/text/models")
    assert len(seen) == 2
    assert not any("text_gen_stats" in statement for statement in seen)
