# SPDX-License-Identifier: AGPL-3.0-or-later
"""What every test may use: the services of the run and a small real backend. Both start when first
asked for.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything defines a model class: it keeps 500 modules of logfire (through horde_sdk) out of
# each process.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")

from devtools.services import ServiceAddresses
from tests import services

TESTS = Path(__file__).resolve().parent
FOLDERS = ("clients", "acceptance", "integration", "unit")

# A busy machine makes examples slow, which says nothing about what is tested. The same examples are
# drawn at every run, so that a run fails by what was changed; others are drawn with
# `--hypothesis-profile=exploring`.
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", settings.get_profile("exploring"), derandomize=True)
settings.load_profile("patient")


def is_first_process(config: pytest.Config) -> bool:
    """Whether this is pytest itself and not one of xdist's processes."""
    return not hasattr(config, "workerinput")


def get_process_name(config: pytest.Config) -> str | None:
    """``gw0``, ``gw1``, ... in xdist's processes, None when there is one process only."""
    return None if is_first_process(config) else str(config.workerinput["workerid"])


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the stress test runs."""
    parser.addoption("--stress-seconds", type=float, default=20.0, help="length of the stress test")


def pytest_configure(config: pytest.Config) -> None:
    """Name the run's folder before xdist starts its processes."""
    if is_first_process(config):
        services.begin_run()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the services when all processes are done."""
    if is_first_process(config):
        services.end_run()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but unit tests need services: `-m "not services"` leaves them out.

    What takes longest comes first, so that no process waits at the end for another one's last file.
    """
    for item in items:
        if not item.path.is_relative_to(TESTS / "unit"):
            item.add_marker(pytest.mark.services)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (rank_folder(item.path), -slow[item.path], str(item.path)))


@cache
def rank_folder(path: Path) -> int:
    """The place of a test's folder: those whose tests share the dearest fixtures stay together, and
    the small tests that need none fill what is left.
    """
    folder = path.relative_to(TESTS).parts[0]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """A command run in this process sends the log where its test captures it, which later threads
    must not write to.
    """
    root, horde = logging.getLogger(), logging.getLogger("horde")
    before = root.handlers[:], root.level, horde.level, threading.excepthook
    yield
    root.handlers[:], root.level, horde.level, threading.excepthook = before


@pytest.fixture(scope="session")
def service_urls(pytestconfig: pytest.Config) -> Iterator[ServiceAddresses]:
    """Postgres, Redis and an S3 store for this process of the run alone; the database is empty at
    first.

    Fields: database_url, redis_url (without a database number), s3_endpoint, s3_access_key,
    s3_secret_key, bucket; ``build_environment()`` has them as settings.
    """
    with services.own_services(get_process_name(pytestconfig)) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def tiny_backend(pytestconfig: pytest.Config) -> Iterator[str]:
    """Address of a real llama.cpp server (add ``/v1``) whose model ``tiny-nonsense`` answers at
    once, with nonsense.

    Tokeniser, chat template with tools, sampling, streaming, grammars and overflow are real.
    """
    with services.running_tiny_backend(get_process_name(pytestconfig)) as url:
        yield url
