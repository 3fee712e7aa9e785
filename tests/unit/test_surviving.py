# SPDX-License-Identifier: AGPL-3.0-or-later
"""Long-lived threads go on after an error that nobody foresaw, and no log shows its text."""

import io
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine

from horde import telemetry
from horde.background import Background, BackgroundThread, Leadership
from horde.config import Config
from horde.logger import configure_logging, get_logger, surviving
from horde.telemetry import MetricsEndpoint, serve_metrics

WAIT_SECONDS = 10


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_survives_is_logged_by_its_class_and_place_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with surviving("test"):
        raise RuntimeError("a secret")
    (record,) = caplog.records
    assert cast(Any, record).error_class == "builtins.RuntimeError"
    assert "a secret" not in str(vars(record)).replace('raise RuntimeError("a secret")', "")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_thread_that_ends_all_the_same_says_no_more(as_json: bool) -> None:
    stream = io.StringIO()
    configure_logging("info", json=as_json, stream=stream)
    secret = "a secret"

    def fail() -> None:
        raise RuntimeError(secret)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert "horde.thread.ended" in stream.getvalue()
    assert "RuntimeError" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_an_exception_that_a_library_logs_comes_without_its_text() -> None:
    stream = io.StringIO()
    configure_logging("info", json=True, stream=stream)
    secret = "a secret"
    try:
        raise RuntimeError(secret)
    except RuntimeError:
        logging.getLogger("library").exception("it failed")
    assert secret not in stream.getvalue()
    assert json.loads(stream.getvalue())["error_class"] == "builtins.RuntimeError"
    get_logger("horde.test").info("horde.thing.done")


def test_the_clock_goes_on_after_a_tick_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = 0

    def fail(_: Background) -> None:
        nonlocal ticks
        ticks += 1
        raise RuntimeError

    monkeypatch.setattr(Background, "tick", fail)
    monkeypatch.setattr("horde.background.TICK_SECONDS", 0.01)
    thread = BackgroundThread(Config(database_url="postgresql+psycopg2://", secret_key="x"), [])
    thread.start()
    wait_until(lambda: ticks > 2)
    thread.stop()


def test_whoever_cannot_prove_that_it_leads_leads_no_more() -> None:
    class Broken:
        def connect(self) -> None:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a message of the server")

    leadership = Leadership(cast(Engine, Broken()))
    leadership.is_leader = True
    assert leadership.refresh() is False


class FailsFirst(Collector):
    """A process's figures, which cannot be had at first."""

    def __init__(self) -> None:
        self.calls = 0

    def collect(self) -> list[Metric]:
        self.calls += 1
        if 1 < self.calls < 4:  # the first is the registry's own
            raise RuntimeError
        family = Metric("horde_test", "A figure.", "gauge")
        family.add_sample("horde_test", {}, 1.0)
        return [family]


def test_the_figures_come_back_after_they_could_not_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "RETRY_SECONDS", 0.01)
    endpoint = MetricsEndpoint(0)
    registry = CollectorRegistry()
    registry.register(FailsFirst())
    serve_metrics(endpoint, registry)

    def scrape() -> str:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
            return str(answer.read().decode())

    wait_until(lambda: "horde_test" in scrape())
