# SPDX-License-Identifier: AGPL-3.0-or-later
"""A horde of real processes that a test may kill: services of its own, the API, a bridge, and
workers it speaks for.

Nothing here looks inside the API: tests ask it over HTTP, and the database only for what no route
tells.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psycopg2
import pytest

from devtools.launcher import START_SECONDS, Launcher, Service
from devtools.postgres import Postgres, remove_external_data
from devtools.processes import Child, find_free_ports, read_start_stamp
from devtools.services import ServiceAddresses
from devtools.state import load_secrets, make_state_folder
from devtools.valkey import Valkey
from tests.services import ROOT, make_database

API_START_SECONDS = 120  # a busy machine; an idle one needs three
STOP_SECONDS = 60
ANSWER_SECONDS = 30  # of one request; what has to be quick is asserted by the test
WAIT_SECONDS = 120

# Several workers of one test may pop far more often than one address may, and all share one
# address.
WITHOUT_LIMITS = {"HORDE_TEST_RATELIMIT_DISABLED": "1"}
WITH_WIDE_LIMITS = {
    "HORDE_TEST_RATELIMIT_DISABLED": "0",
    "HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP": "1000/second",
    "HORDE_TEXT_REQUEST_90MIN_LIMIT_PER_IP": "10000/minute",
}
MANY_WAITING = 1000  # generations an account of a test may have waiting

CHAT_LIMITS = {"max_context_length": 8192, "max_length": 1024}
CHAT_FEATURES = [
    "frequency_penalty",
    "json_object",
    "presence_penalty",
    "prompt_overflow_refused",
    "seed",
    "tools",
]

type Answer = httpx.Response


def wait_until(
    condition: Callable[[], object], seconds: float = WAIT_SECONDS, *, log: Path | None = None
) -> Any:
    """Ask until the answer is true. Returns it; a failure shows the end of ``log``."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            tail = log.read_text()[-3000:] if log is not None else ""
            pytest.fail(f"waited {seconds} s in vain\n{tail}")
        time.sleep(0.05)
    return result


class Commands:
    """A process that runs ``horde`` commands for a test, as an operator on another host would."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.acceptance._commands"]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output of one command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return int(answer["code"]), str(answer["output"])

    def require(self, *words: str) -> str:
        """The output of a command that has to succeed."""
        code, output = self.run(*words)
        assert code == 0, output
        return output

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=STOP_SECONDS)


class FailingServices:
    """A Postgres and a Redis that a test stops and starts again on their ports. Main thread only.

    Postgres waits for the disk, so that nothing answered with success may be missing after a crash.
    Redis keeps nothing.
    """

    def __init__(self, state: Path) -> None:
        make_state_folder(state)
        self._state, self._secrets = state, load_secrets(state)
        self._launcher = Launcher(state / "services.json")
        self.postgres = Postgres(
            state,
            password=self._secrets["postgres_password"],
            token=self._secrets["token"],
            durable=True,
        )
        self.valkey = Valkey(state, password=self._secrets["redis_password"], durable=False)
        self._children: dict[str, tuple[Service, Child]] = {}

    def start(self) -> None:
        """Start both and wait until they answer."""
        self._launcher.launch_all([self.postgres, self.valkey])
        for child in self._launcher.children:
            self._children[child.name] = (
                self.postgres if child.name == "postgres" else self.valkey,
                child,
            )

    def send(self, name: str, number: signal.Signals) -> None:
        """Signal ``postgres`` or ``valkey`` and go on."""
        process = self._children[name][1].process
        assert process is not None
        process.send_signal(number)

    def stop(self, name: str, number: signal.Signals) -> None:
        """Signal one and wait for its end."""
        self.send(name, number)
        process = self._children[name][1].process
        assert process is not None
        process.wait(STOP_SECONDS)

    def start_again(self, name: str) -> None:
        """Start one where it was, and wait until it answers."""
        service, child = self._children[name]
        if isinstance(service, Postgres):
            service.drop_dead_lock()
        child.start()
        child.wait_until(service.is_ready, START_SECONDS)

    def close(self) -> None:
        """Stop both and delete what they stored."""
        for _, child in self._children.values():
            if child.process is not None and child.is_alive():
                # A test that failed may have left it frozen.
                child.process.send_signal(signal.SIGCONT)
        self._launcher.stop_all()
        remove_external_data(self._secrets["token"])


class Database:
    """Rows for what no route tells; each statement is a transaction on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement; its rows, none when it has none."""
        connection = psycopg2.connect(self._url)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(statement, parameters)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def value(self, statement: str, *parameters: object) -> Any:
        """The first column of the first row."""
        return self.rows(statement, *parameters)[0][0]


@dataclass
class Account:
    """An account made by ``horde user create``."""

    id: int
    alias: str
    key: str


class Api:
    """``horde serve`` with two processes on one port, started and ended as often as a test
    likes.
    """

    def __init__(
        self, environment: Mapping[str, str], folder: Path, *, module: str = "horde.cli.main"
    ) -> None:
        self.environment, self.log, self._module = environment, folder / "api.log", module
        self.port = find_free_ports(1)[0]
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/api/v2", timeout=ANSWER_SECONDS, verify=False
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the API's routes begin."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """gunicorn's parent process."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [
            sys.executable,
            "-m",
            self._module,
            "serve",
            "--port",
            str(self.port),
            "--workers",
            "2",
            "--threads",
            "16",
        ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        wait_until(self.is_serving, API_START_SECONDS, log=self.log)

    def is_serving(self) -> bool:
        """Whether its heartbeat answers."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.http.get("/status/heartbeat").status_code == 200
        except httpx.TransportError:
            return False

    def list_process_ids(self) -> list[int]:
        """The processes that serve, the parent not among them."""
        return [
            int(word)
            for word in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text()
            .split()
        ]

    def kill(self) -> None:
        """End every process of it at once, without a chance to finish anything."""
        served = self.list_process_ids()
        os.killpg(self.process.pid, signal.SIGKILL)  # its session holds nothing but itself
        self.process.wait(STOP_SECONDS)
        wait_until(lambda: all(read_start_stamp(pid) is None for pid in served))

    def terminate(self) -> int:
        """Ask it to end. Returns its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.http.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOP_SECONDS)

    def find_leader(self) -> int | None:
        """The process that runs the periodic jobs, by the last event of one that became the leader
        and lives.
        """
        leader = None
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "horde.background.leader_changed" and event.get(
                    "is_leader"
                ):
                    leader = int(event["pid"])
        return leader if leader is not None and read_start_stamp(leader) is not None else None

    # What a requester does.

    def post(self, path: str, body: object, key: str) -> Answer:
        """POST a JSON body."""
        return self.http.post(path, json=body, headers={"apikey": key})

    def queue_text(self, key: str, model: str, **more: Any) -> str:
        """Queue a text request that has to be accepted. Returns its id."""
        answer = self.post("/generate/text/async", build_text_request(model, **more), key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def queue_chat(self, key: str, model: str, **more: Any) -> str:
        """Queue a chat request that has to be accepted. Returns its id."""
        answer = self.post("/generate/chat/async", build_chat_request(model, **more), key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def get_status(self, kind: str, request_id: str) -> dict[str, Any]:
        """The status of a ``text`` or ``chat`` request that has to be known."""
        answer = self.http.get(f"/generate/{kind}/status/{request_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_for_reply(
        self, kind: str, request_id: str, seconds: float = WAIT_SECONDS
    ) -> dict[str, Any]:
        """The status once the request is done."""

        def find_done() -> dict[str, Any] | None:
            status = self.get_status(kind, request_id)
            return status if status["done"] else None

        return dict(wait_until(find_done, seconds, log=self.log))


class Front:
    """``horde front`` before an API."""

    def __init__(self, api: Api, folder: Path, **settings: str) -> None:
        self.environment, self.log = {**api.environment, **settings}, folder / "front.log"
        self.port = find_free_ports(1)[0]
        self._native_url = api.url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where its page is; OpenAI's routes are below ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it reaches the API."""
        command = [
            sys.executable,
            "-m",
            "horde.cli.main",
            "front",
            "--port",
            str(self.port),
            "--native-url",
            self._native_url,
        ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        wait_until(self.is_ready, API_START_SECONDS, log=self.log)

    def is_ready(self) -> bool:
        """Whether it says so."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=ANSWER_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def build_text_request(
    model: str, *, n: int = 1, max_length: int = 24, **params: Any
) -> dict[str, Any]:
    """The body of a text request."""
    params = {"n": n, "max_length": max_length, "max_context_length": 1024, **params}
    return {"prompt": "Once upon a time", "models": [model], "params": params}


def build_chat_request(model: str, **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Name one colour."}],
        "max_tokens": 32,
        **more,
    }


@dataclass
class ScriptedWorker:
    """A worker that pops and submits when the test says so."""

    api: Api
    key: str
    name: str
    model: str
    takes_chat: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def post_pop(self) -> Answer:
        """Pop, whatever the answer."""
        body: dict[str, Any] = {
            "name": self.name,
            "models": [self.model],
            "max_length": 1024,
            "max_context_length": 8192,
            "threads": 8,
            "bridge_agent": "Horde Bridge:1:https://example.org",
        }
        if self.takes_chat:
            body |= {
                "chat_jobs": True,
                "model_id": self.model,
                "chat_features": CHAT_FEATURES,
                "chat_limits": CHAT_LIMITS,
            }
        return self.api.post("/generate/text/pop", body | self.changes, self.key)

    def pop(self) -> dict[str, Any] | None:
        """A job, None when there is none for this worker."""
        answer = self.post_pop()
        assert answer.status_code == 200, answer.text
        job = dict(answer.json())
        return job if job["id"] is not None else None

    def require_job(self) -> dict[str, Any]:
        """A job that has to be there."""
        job = self.pop()
        assert job is not None
        return job

    def post_reply(self, job: Mapping[str, Any], text: str = "blue") -> Answer:
        """Hand in a reply, whatever the answer."""
        return self.api.post("/generate/text/submit", build_reply(job, text), self.key)

    def post_progress(self, job_id: str, seq: int, content: str) -> Answer:
        """Post what was generated since the previous post, whatever the answer."""
        body = {"id": job_id, "seq": seq, "delta": {"content": content}}
        return self.api.post("/generate/text/progress", body, self.key)

    def submit(self, job: Mapping[str, Any], text: str = "blue") -> float:
        """Hand in a reply that has to be taken. Returns the reward."""
        answer = self.post_reply(job, text)
        assert answer.status_code == 200, answer.text
        return float(answer.json()["reward"])


def build_reply(job: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The submit of a popped job."""
    if job.get("chat"):
        message = {"role": "assistant", "content": text}
        return {
            "id": job["id"],
            "model_id": job["model"],
            "message": message,
            "finish_reason": "stop",
        }
    return {"id": job["id"], "generation": text, "state": "ok"}


@dataclass
class Horde:
    """The API on a database of its own, and the accounts of a test."""

    api: Api
    database: Database
    environment: Mapping[str, str]
    commands: Commands

    @classmethod
    def build(cls, services: Mapping[str, str], folder: Path, **settings: str) -> Self:
        """On the services of these settings; nothing is started yet but the process for
        commands.
        """
        defaults = {
            "HORDE_ENVIRONMENT": "development",
            "HORDE_LOG_FORMAT": "json",
            **WITHOUT_LIMITS,
        }
        environment = {**os.environ, **defaults, **services, **settings}
        return cls(
            Api(environment, folder),
            Database(services["DATABASE_URL"]),
            environment,
            Commands(environment),
        )

    def start(self) -> None:
        """Migrate the database and start the API."""
        self.commands.require("db", "migrate")
        self.api.start()

    def close(self) -> None:
        """End all processes."""
        self.api.close()
        self.commands.close()

    def create_account(self, name: str, *, is_trusted: bool = True) -> Account:
        """An account with kudos that may have a thousand requests waiting."""
        trust = ["--trusted"] if is_trusted else []
        made = json.loads(
            self.commands.require("user", "create", "--username", name, "--kudos", "100000", *trust)
        )
        self.database.rows(
            "UPDATE users SET concurrency = %s WHERE id = %s", MANY_WAITING, made["id"]
        )
        return Account(made["id"], made["alias"], made["api_key"])

    def audit(self) -> dict[str, Any]:
        """The report of ``horde kudos audit``, which has to find nothing."""
        wait_until(lambda: self.count_unfolded() == 0)
        return dict(json.loads(self.commands.require("kudos", "audit")))

    def count_unfolded(self) -> int:
        """Postings that no balance shows yet."""
        return int(
            self.database.value(
                "SELECT (SELECT count(*) FROM kudos_ledger WHERE NOT applied)"
                " + (SELECT count(*) FROM kudos_stat_queue)"
            )
        )

    def count_payments(self, account: Account) -> int:
        """How often this account was paid for a reply."""
        return int(
            self.database.value(
                "SELECT count(*) FROM kudos_ledger WHERE user_id = %s"
                " AND entry_type = 'GENERATION' AND amount > 0",
                account.id,
            )
        )

    def end_leases(self, *job_ids: str) -> None:
        """Turn the clock of these pending jobs back to before their lease."""
        self.database.rows(
            "UPDATE processing_gens SET start_time = start_time - interval '1 hour'"
            " WHERE id = ANY(%s::uuid[]) AND generation IS NULL AND NOT faulted",
            list(job_ids),
        )

    def clean_up(self) -> None:
        """Run the leader's pass over stale jobs and expired requests now."""
        self.commands.require("clean-up")


@contextlib.contextmanager
def running_bridge(
    horde: Horde, key: str, backend: str, name: str, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``horde bridge`` between the API and a backend's address (without /v1), once the API lists
    its model.
    """
    log = horde.api.log.with_name(f"{name}.log")
    command = [
        sys.executable,
        "-m",
        "horde.cli.main",
        "bridge",
        "--api",
        horde.api.url,
        "--backend",
        f"{backend}/v1",
    ]
    environment = {**os.environ, "HORDE_BRIDGE_KEY": key}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--name", name, "--log-format", "json", *options],
            cwd=ROOT,
            env=environment,
            stderr=output,
        )
    try:
        wait_until(lambda: is_online(horde, name), API_START_SECONDS, log=log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_online(horde: Horde, name: str) -> bool:
    """Whether a worker has popped and not left, so that requests for its model are let in."""
    statement = (
        "SELECT count(*) FROM workers WHERE name = %s"
        " AND last_check_in > now() AT TIME ZONE 'utc' - interval '1 minute'"
    )
    return bool(horde.database.value(statement, name))


@contextlib.contextmanager
def running_horde(services: Mapping[str, str], folder: Path, **settings: str) -> Iterator[Horde]:
    """A horde with its API started."""
    horde = Horde.build(services, folder, **settings)
    try:
        horde.start()
        yield horde
    finally:
        horde.close()


@contextlib.contextmanager
def running_front(horde: Horde, folder: Path, **settings: str) -> Iterator[Front]:
    """The front of a horde."""
    front = Front(horde.api, folder, **settings)
    try:
        front.start()
        yield front
    finally:
        front.close()


def build_shared_environment(addresses: ServiceAddresses, name: str) -> dict[str, str]:
    """The services of the run with a database of one's own."""
    return {
        **addresses.build_environment(),
        "DATABASE_URL": make_database(addresses.database_url, name),
    }
