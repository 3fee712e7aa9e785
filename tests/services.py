# SPDX-License-Identifier: AGPL-3.0-or-later
"""The services of a test run: one set for all its processes, started by the first test that asks.

pytest's first process names a folder for the run in the environment, which xdist's processes
inherit. Whoever needs the services first starts their keeper; every process then takes a database,
a Redis and a bucket of its own, so that tests in different processes cannot meet. Addresses in the
environment win, as everywhere.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql

from devtools.backend import Backend
from devtools.keeper import read_addresses
from devtools.launcher import Launcher
from devtools.services import ServiceAddresses, Services
from devtools.state import make_state_folder
from tests.tiny_gguf import write_tiny_model

RUN_FOLDER_VARIABLE = "HORDE_TEST_RUN_FOLDER"
# Process id of pytest's first process; the keeper ends with it.
RUN_OWNER_VARIABLE = "HORDE_TEST_RUN_OWNER"
START_SECONDS = 90
STOP_SECONDS = 20
TINY_MODEL_NAME = "tiny-nonsense"

ROOT = Path(__file__).resolve().parent.parent


def begin_run() -> None:
    """In pytest's first process: name the folder. Nothing is started yet, since unit tests need
    nothing.
    """
    folder = tempfile.mkdtemp(prefix="horde-test-")
    os.environ[RUN_FOLDER_VARIABLE] = folder
    os.environ[RUN_OWNER_VARIABLE] = str(os.getpid())


def end_run() -> None:
    """In pytest's first process: stop what was started and delete the folder."""
    folder = Path(os.environ.pop(RUN_FOLDER_VARIABLE))
    os.environ.pop(RUN_OWNER_VARIABLE)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        keeper = int((folder / "keeper.pid").read_text())
        os.kill(keeper, 15)
        deadline = time.monotonic() + STOP_SECONDS
        # The keeper deletes it last.
        while (folder / "services").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def get_run_folder() -> Path:
    """The folder of this run."""
    return Path(os.environ[RUN_FOLDER_VARIABLE])


@contextlib.contextmanager
def run_lock(name: str) -> Iterator[None]:
    """One process of the run at a time."""
    with (get_run_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_shared_services() -> ServiceAddresses:
    """The addresses all processes of the run share; starts the keeper when nobody has."""
    state = get_run_folder() / "services"
    with run_lock("services"):
        if (addresses := read_addresses(state)) is not None:
            return addresses
        make_state_folder(get_run_folder())
        log = get_run_folder() / "keeper.log"
        with log.open("wb") as output:
            keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "devtools.keeper",
                    str(state),
                    "--watch",
                    os.environ[RUN_OWNER_VARIABLE],
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        (get_run_folder() / "keeper.pid").write_text(str(keeper.pid))
        deadline = time.monotonic() + START_SECONDS
        while (addresses := read_addresses(state)) is None:
            if keeper.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"the services of the tests do not start\n{log.read_text()}", pytrace=False
                )
            time.sleep(0.05)
        # It outlives this process; without this its end would be reported as our leak.
        keeper.returncode = 0
        return addresses


@contextlib.contextmanager
def own_services(process_name: str | None) -> Iterator[ServiceAddresses]:
    """The addresses one process of the run uses; ``None`` is a run in one process, which needs no
    share of its own.
    """
    shared = require_shared_services()
    if process_name is None:
        yield shared
        return
    if "REDIS_URL" in os.environ:
        pytest.fail(
            "REDIS_URL is one Redis for all processes, whose tests would meet in it: run with -n 0",
            pytrace=False,
        )
    taken = dataclasses.replace(
        shared,
        database_url=make_database(shared.database_url, process_name),
        bucket=f"{shared.bucket}-{process_name}",
    )
    # All but Redis is there already, so that Redis is what this starts; the bucket is made on the
    # way.
    environment = {**os.environ, **taken.build_environment()}
    del environment["REDIS_URL"]
    services = Services(get_run_folder() / process_name, environment, durable=False)
    try:
        yield services.start()
    finally:
        services.stop()


def make_database(database_url: str, suffix: str) -> str:
    """An empty database beside the given one. Returns its address."""
    name = f"{urllib.parse.urlsplit(database_url).path.lstrip('/')}_{suffix}"
    connection = psycopg2.connect(database_url)
    try:
        connection.autocommit = True  # CREATE DATABASE refuses to run inside a transaction
        with connection.cursor() as cursor:
            cursor.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )
            cursor.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name))
            )
    finally:
        connection.close()
    return urllib.parse.urlsplit(database_url)._replace(path=f"/{name}").geturl()


@contextlib.contextmanager
def running_tiny_backend(process_name: str | None) -> Iterator[str]:
    """A real llama.cpp server on a model of nonsense words. Yields its address, without ``/v1``."""
    folder = get_run_folder() / f"backend-{process_name or 'only'}"
    folder.mkdir()
    model = folder / "tiny.gguf"
    write_tiny_model(model)
    launcher = Launcher(folder / "children.json")
    backend = Backend(model, name=TINY_MODEL_NAME, log=folder / "backend.log")
    try:
        launcher.launch_all([backend])
        yield backend.url
    finally:
        launcher.stop_all()
