# SPDX-License-Identifier: AGPL-3.0-or-later
"""The benchmarks run and print what they promise. How fast anything was is not judged: the machine
may be busy.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from devtools.services import ServiceAddresses
from tests.services import ROOT, make_database

LIMIT_SECONDS = 600
# A job may execute so many. Caches that are read anew in the meantime count too: hence the room.
MILLION_INSTRUCTIONS = {"text job": 15, "chat job": 17}


def run_benchmark(
    service_urls: ServiceAddresses, name: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """`dev.py bench NAME` on the services of the tests."""
    url = make_database(service_urls.database_url, f"bench_{name}")
    environment = {**os.environ, **service_urls.build_environment(), "DATABASE_URL": url}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_the_images_benchmark_decodes_two_at_a_time_at_most(service_urls: ServiceAddresses) -> None:
    answer = run_benchmark(service_urls, "images", "--json", "--rounds", "1", "--images", "3")
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["images"] == 3
    assert 1 <= figures["decoded_at_once"] <= 2


@pytest.mark.slow
def test_every_page_is_small_and_asks_the_database_thrice_at_most(
    service_urls: ServiceAddresses,
) -> None:
    sizes = ("--users", "30", "--workers", "20", "--statistics", "50", "--calls", "1")
    answer = run_benchmark(service_urls, "pages", "--json", *sizes)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)["rows"]
    assert {row["page"] for row in rows} >= {"start", "API", "account", "dashboard"}
    for row in rows:
        assert row["cached_statements"] <= 3, row
        assert (row["first_load_kilobytes"] or 0) < 150, row


@pytest.mark.slow
@pytest.mark.parametrize("family", [(), ("--chat",)])
def test_the_queue_benchmark_prints_a_row_for_the_floor_and_each_filling(
    service_urls: ServiceAddresses, family: tuple[str, ...]
) -> None:
    answer = run_benchmark(service_urls, "queue", "--quick", "--json", *family)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert [(row["backlog"], row["depth"], row["workers"]) for row in rows] == [
        ("floor", 0, 2),
        ("none", 0, 0),
        ("none", 0, 2),
        ("model", 20, 0),
        ("model", 20, 2),
    ]
    assert set(rows[1]["milliseconds"]) == {"async", "pop", "submit", "status", "idle", "beat"}
    assert set(rows[1]) == set(rows[2])
    assert "jobs/s" in answer.stderr
    assert "against depth 0" in answer.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("callgrind_control"), reason="valgrind is not installed")
def test_a_job_executes_no_more_instructions_than_it_may(service_urls: ServiceAddresses) -> None:
    answer = run_benchmark(service_urls, "instructions", "--json", "--calls", "5")
    assert answer.returncode == 0, answer.stderr
    millions = json.loads(answer.stdout)
    assert {job for job, most in MILLION_INSTRUCTIONS.items() if millions[job] > most} == set(), (
        millions
    )
    assert all(millions[job] > 1 for job in MILLION_INSTRUCTIONS)  # something was counted


@pytest.mark.slow
def test_the_progress_benchmark_loses_no_entry_and_compares_with_the_bare_script(
    service_urls: ServiceAddresses,
) -> None:
    answer = run_benchmark(service_urls, "progress", "--quick", "--json")
    assert answer.returncode == 0, answer.stderr
    script, alone, streaming = json.loads(answer.stdout)
    assert [(row["name"], row["jobs"], row["lost"]) for row in (script, alone, streaming)] == [
        ("EVALSHA", 1, None),
        ("alone", 1, 0),
        ("streaming", 4, 0),
    ]
    assert (alone["posts"], streaming["posts"]) == (9, 8)
    for row in (alone, streaming):
        assert row["script_ratio"] > 0
        assert all(row[f"{name}_ms"][0] > 0 for name in ("server", "client", "reader"))
    assert "x script" in answer.stderr


@pytest.mark.slow
def test_the_benchmark_of_streams_delivers_every_post(service_urls: ServiceAddresses) -> None:
    answer = run_benchmark(service_urls, "front_streams", "--quick", "--json")
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    (row,) = figures["streams"]
    assert (row["streams"], row["posts"], row["delivered"], row["finished"]) == (5, 10, 10, 5)
    (completions,) = figures["completions"]
    assert completions["front_ms"] > 0 < completions["native_ms"]
    assert "KiB/stream" in answer.stderr


@pytest.mark.slow
def test_the_benchmark_of_waiting_pops_gives_every_job_to_a_waiting_worker(
    service_urls: ServiceAddresses,
) -> None:
    answer = run_benchmark(service_urls, "waiting_pops", "--quick", "--json")
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads(answer.stdout)["waiting"]
    assert (row["workers"], row["jobs"]) == (5, 5)
    assert row["worker_kib"] > 0
    assert row["sent_ms"][0] > row["accepted_ms"][0]
    assert row["direct_ms"][0] > 0
    assert "KiB/worker" in answer.stderr


@pytest.mark.slow
def test_the_benchmark_of_idle_polls_says_what_a_pop_costs(service_urls: ServiceAddresses) -> None:
    answer = run_benchmark(service_urls, "idle_polls", "--quick", "--json")
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads(answer.stdout)["idle"]
    assert row["workers"] == 5
    assert row["pops"] >= 5
    assert row["core_share"] == pytest.approx(row["cpu_ms"] * 2)
    assert "core of 2,000" in answer.stderr


@pytest.mark.slow
def test_the_lists_benchmark_costs_each_list_three_statements_at_most(
    service_urls: ServiceAddresses,
) -> None:
    sizes = ("--users", "200", "--workers", "20", "--statistics", "500", "--calls", "2")
    answer = run_benchmark(service_urls, "lists", "--json", *sizes)
    assert answer.returncode == 0, answer.stderr
    rows = {row["route"]: row for row in json.loads(answer.stdout)["rows"]}
    assert {"users by kudos", "workers", "models", "stats totals", "teams"} <= rows.keys()
    costs = {name: row["statements"] for name, row in rows.items()}
    assert max(costs.values()) <= 3


@pytest.mark.slow
def test_the_benchmark_of_forms_prints_a_row_for_each(service_urls: ServiceAddresses) -> None:
    answer = run_benchmark(service_urls, "front_forms", "--quick", "--json")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert [row["form"] for row in rows] == ["chat", "messages", "responses"]
    assert all(row["call_ms"] > 0 for row in rows)
