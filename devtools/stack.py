# SPDX-License-Identifier: AGPL-3.0-or-later
"""``dev.py run`` and ``dev.py stop``: services, API, front, a small model and a worker, held
together by one supervisor.

The supervisor is the process of ``run`` itself, or with ``--detach`` one in the background. It
holds a lock on the state folder while it lives, so a ``run.json`` that a killed stack left behind
is never taken for a running one.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from devtools.backend import DEMO_MODEL_NAME, Backend, find_demo_model
from devtools.command_line import DEFAULT_FRONT_PORT, list_worker_words
from devtools.launcher import Launcher, RestartBudget
from devtools.processes import (
    CannotRun,
    Child,
    StartFailed,
    Stopped,
    check_port_permitted,
    find_free_ports,
    is_port_free,
    raise_when_asked_to_stop,
)
from devtools.services import ServiceAddresses, Services
from devtools.state import build_state_refusal, load_secrets, make_state_folder, write_private

ROOT = Path(__file__).resolve().parent.parent
HORDE = Path(sys.executable).with_name("horde")

WATCH_SECONDS = 0.5
STOP_SECONDS = 60
RESTART_PAUSE_SECONDS = 1
PORT_SECONDS = 45  # an orphan finishes its requests for 30 s, and would hold the port as long
DEMO_KUDOS = 100000

EXAMPLE_MESSAGES = [
    # A model this small needs to be told, and a temperature of 0, to make sense.
    {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
    {"role": "user", "content": "Name three fruits."},
]


def run(arguments: argparse.Namespace) -> int:
    """Bring a stack up; in the foreground until Ctrl-C. Returns 1 when it does not come up.

    Raises CannotRun before anything is started.
    """
    check_ports(arguments)
    state = Path(arguments.state).resolve()
    make_state_folder(state)
    if arguments.detach:
        return run_detached(state, arguments)
    raise_when_asked_to_stop()
    try:
        with hold_state(state):
            stack = Stack(state, arguments)
            try:
                stack.start()
                stack.watch()
            except Stopped:
                say("Stopping ...")
            finally:
                stack.stop()
    except StartFailed as error:
        print(f"dev.py: {error}", file=sys.stderr, flush=True)
        return 1
    except Stopped:
        return 0
    say("Stopped.")
    return 0


def check_ports(arguments: argparse.Namespace) -> None:
    """Raise CannotRun for ports that can never be served."""
    if arguments.port == arguments.front_port:
        raise CannotRun(f"--port and --front-port are both {arguments.port}; they have to differ")
    for port in (arguments.port, arguments.front_port):
        if port is not None:
            check_port_permitted(port)


def run_detached(state: Path, arguments: argparse.Namespace) -> int:
    """Start the supervisor in the background and show what it says until it is ready."""
    log = state / "logs" / "supervisor.log"
    command = [
        sys.executable,
        str(ROOT / "dev.py"),
        "run",
        "--port",
        str(arguments.port),
        "--state",
        str(state),
    ]
    command += ["--front-port", str(arguments.front_port)] if arguments.front_port else []
    command += ["--no-worker"] if arguments.no_worker else []
    command += ["--backend", arguments.backend] if arguments.backend else []
    command += list_worker_words(arguments)
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with log.open() as said:
        try:
            while (code := supervisor.poll()) is None and read_run_file(state).get(
                "pid"
            ) != supervisor.pid:
                sys.stdout.write(said.read())
                sys.stdout.flush()
                time.sleep(0.1)
        except KeyboardInterrupt:
            supervisor.terminate()
            code = supervisor.wait()
        sys.stdout.write(said.read())
    if code is not None:
        return code or 1
    say(f"It goes on in the background. Stop it with: {describe_stop(state)}")
    supervisor.returncode = 0  # it outlives us on purpose
    return 0


def stop(state: Path) -> int:
    """Stop the stack of a state folder and wait for its end. 0 also when none runs."""
    state = state.resolve()
    if not state.exists():
        say(f"Nothing runs in {state}.")
        return 0
    deadline = time.monotonic() + STOP_SECONDS
    asked = False
    while (holder := read_holder(state)) is not None:
        if not asked:
            os.kill(holder, signal.SIGTERM)
            asked = True
        if time.monotonic() > deadline:
            print(f"dev.py: process {holder} does not stop", file=sys.stderr)
            return 1
        time.sleep(0.1)
    # The supervisor may have been killed: its children end by themselves, and its file is stale.
    for record in ("programs.json", "services.json"):
        Launcher(state / record).wait_for_leftovers()
    (state / "run.json").unlink(missing_ok=True)
    say("Stopped." if asked else f"Nothing runs in {state}.")
    return 0


class Stack:
    """Everything one supervisor runs."""

    def __init__(self, state: Path, arguments: argparse.Namespace) -> None:
        self.state = state
        self.port = int(arguments.port)
        self.wanted_front_port: int | None = arguments.front_port
        self.front_port = arguments.front_port or DEFAULT_FRONT_PORT
        self.with_worker = not arguments.no_worker
        self.backend_url: str | None = arguments.backend and arguments.backend.rstrip(
            "/"
        ).removesuffix("/v1")
        self.worker_words = list_worker_words(arguments)
        self.services = Services(state, os.environ)
        self.programs = Launcher(state / "programs.json")
        self.secrets = load_secrets(state)
        self.restarts = RestartBudget()
        self.facts: dict[str, Any] = {}

    @property
    def api_url(self) -> str:
        """Where the API's routes begin."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def front_url(self) -> str:
        """Where the front's page is; OpenAI's routes are below ``/v1``."""
        return f"http://127.0.0.1:{self.front_port}"

    def start(self) -> None:
        """Start all, each as soon as what it needs answers; then write run.json. Raises
        StartFailed.
        """
        started = time.monotonic()
        (self.state / "run.json").unlink(missing_ok=True)
        self.programs.wait_for_leftovers()
        if not is_port_free(self.port):
            raise StartFailed(f"port {self.port} is taken; choose another one with --port")
        if self.wanted_front_port is not None and not is_port_free(self.wanted_front_port):
            raise StartFailed(
                f"port {self.wanted_front_port} is taken; choose another one with --front-port"
            )
        backend = self.launch_backend() if self.with_worker and self.backend_url is None else None
        say("Starting the services ...")
        addresses = self.services.start()
        environment = self.build_environment(addresses)
        say("Starting the API and the front ...")
        run_program([str(HORDE), "db", "migrate"], environment, self.state)
        self.choose_front_port()
        api = Api(self, {"HORDE_FRONT_URL": self.front_url, **environment})
        api_child = self.programs.launch(api)
        front = Front(self, environment)
        front_child = self.programs.launch(front)
        # Needs the database only, so it is made while the API comes up.
        user = self.require_demo_user(environment)
        self.programs.wait_until_ready(api, api_child)
        self.programs.wait_until_ready(front, front_child)
        self.facts = {
            "api_url": self.api_url,
            "front_url": f"{self.front_url}/v1",
            "page_url": f"{self.front_url}/",
            "key": user["api_key"],
            "user": user["alias"],
            "pid": os.getpid(),
            **dataclasses.asdict(addresses),
            "backend_url": self.backend_url,
            "worker": None,
            "model": None,
            "logs": str(self.state / "logs"),
        }
        if backend is not None:
            self.programs.wait_until_ready(*backend)
            self.backend_url = backend[0].url
        if self.with_worker:
            self.start_worker(user["api_key"], environment)
        say(f"Ready after {time.monotonic() - started:.0f} s.\n")
        say(self.describe())
        self.write_run_file()

    def build_environment(self, addresses: ServiceAddresses) -> dict[str, str]:
        """The settings of the project's processes; what the user has set already counts."""
        defaults = {"HORDE_ENVIRONMENT": "development", "secret_key": self.secrets["secret_key"]}
        return {**defaults, **os.environ, **addresses.build_environment()}

    def choose_front_port(self) -> None:
        """Settle where the front will be: the usual port unless another stack has it. The API's
        pages link to it, so it is known before either starts.
        """
        if self.wanted_front_port is None:
            usual = self.port != DEFAULT_FRONT_PORT and is_port_free(DEFAULT_FRONT_PORT)
            self.front_port = DEFAULT_FRONT_PORT if usual else find_free_ports(1)[0]

    def require_demo_user(self, environment: dict[str, str]) -> dict[str, str]:
        """{id, alias, api_key} of the user that owns the worker and makes the example request; made
        once per state.
        """
        path = self.state / "demo-user.json"
        if not path.exists():
            words = [
                str(HORDE),
                "user",
                "create",
                "--username",
                "demo",
                "--trusted",
                "--kudos",
                str(DEMO_KUDOS),
            ]
            write_private(path, run_program(words, environment, self.state))
        return {str(name): str(value) for name, value in json.loads(path.read_text()).items()}

    def launch_backend(self) -> tuple[Backend, Child]:
        """The small model's server, which loads while the rest starts."""
        backend = Backend(
            find_demo_model(), name=DEMO_MODEL_NAME, log=self.state / "logs" / "backend.log"
        )
        return backend, self.programs.launch(backend)

    def start_worker(self, key: str, environment: dict[str, str]) -> None:
        """The bridge that offers the backend; returns when the API lists its model."""
        say("Starting the worker ...")
        name = f"demo-worker-{self.secrets['token'][:6]}"
        words = [
            "--api",
            self.api_url,
            "--backend",
            f"{self.backend_url}/v1",
            "--name",
            name,
        ]
        command = [str(HORDE), "bridge", *words, *self.worker_words]
        # The key goes by the environment: every user of the machine can read command lines.
        worker = Worker(self, command, {**environment, "HORDE_BRIDGE_KEY": key})
        self.programs.launch_all([worker])
        self.facts |= {"backend_url": self.backend_url, "worker": name, "model": worker.model}

    def watch(self) -> None:
        """Look after the children until Stopped is raised. One that ends is started again, a few
        times at most.
        """
        while True:
            time.sleep(WATCH_SECONDS)
            for child in [*self.services.launcher.children, *self.programs.children]:
                if not child.is_alive():
                    self.restart(child)

    def restart(self, child: Child) -> None:
        """Start an ended child again, on its old port. Raises StartFailed when it did so too
        often.
        """
        if not self.restarts.take(child.name):
            raise StartFailed(
                f"{child.name} keeps ending; the end of {child.log}:\n{child.read_log_tail()}"
            )
        say(f"{child.name} ended; starting it again.")
        time.sleep(RESTART_PAUSE_SECONDS)
        child.wait_for_port(PORT_SECONDS)
        child.start()
        for launcher in (self.services.launcher, self.programs):
            launcher.write_record()
        self.write_run_file()

    def stop(self) -> None:
        """Stop all, those first that use the others."""
        (self.state / "run.json").unlink(missing_ok=True)
        for child in reversed(self.programs.children):
            child.stop()
        self.programs.stop_all()
        self.services.stop()

    def write_run_file(self) -> None:
        """What scripts need to know of a running stack. Private, since it holds keys."""
        processes = {
            **self.services.launcher.list_process_ids(),
            **self.programs.list_process_ids(),
        }
        write_private(
            self.state / "run.json",
            json.dumps({**self.facts, "processes": processes}, indent=2) + "\n",
        )

    def describe(self) -> str:
        """What a person needs: where things are, the key, and a first request to paste."""
        lines = [
            f"API        {self.api_url} (documentation at {self.api_url}/)",
            (
                f"Front      {self.front_url}/v1 for OpenAI's clients (a page to chat at"
                f" {self.front_url}/)"
            ),
            f"Key        {self.facts['key']} (user {self.facts['user']})",
            f"Logs       {self.facts['logs']}",
            f"Addresses  {self.state / 'run.json'}",
        ]
        if self.facts["model"] is None:
            worker = (
                f"HORDE_BRIDGE_KEY={shlex.quote(self.facts['key'])} .venv/bin/horde bridge"
                f" --api {self.api_url} --backend URL/v1 --name NAME"
            )
            lines += [
                "",
                "No worker runs. To offer an OpenAI-compatible backend of yours:",
                "",
                f"  {worker}",
            ]
        else:
            lines += [f"Worker     {self.facts['worker']}, serving {self.facts['model']}", ""]
            lines += ["A first chat, with OpenAI's library:", ""]
            lines += build_openai_example(self.front_url, self.facts["key"], self.facts["model"])
            lines += ["", "The same with the horde's own routes:", ""]
            lines += build_example(self.api_url, self.facts["key"], self.facts["model"])
        return "\n".join([*lines, "", "Ctrl-C or this stops it: " + describe_stop(self.state)])


@dataclass
class Api:
    """The API server."""

    stack: Stack
    environment: dict[str, str]

    def build(self) -> Child:
        """``horde serve`` on the chosen port."""
        command = [str(HORDE), "serve", "--listen", "127.0.0.1", "--port", str(self.stack.port)]
        return Child(
            "api",
            command,
            self.stack.state / "logs" / "api.log",
            self.environment,
            self.stack.state,
            port=self.stack.port,
        )

    def is_ready(self, child: Child) -> bool:
        """Whether its heartbeat answers."""
        return get_json(f"{self.stack.api_url}/v2/status/heartbeat") is not None


@dataclass
class Front:
    """The OpenAI-compatible front."""

    stack: Stack
    environment: dict[str, str]

    def build(self) -> Child:
        """``horde front`` before the API."""
        command = [
            str(HORDE),
            "front",
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.stack.front_port),
        ]
        command += ["--native-url", self.stack.api_url]
        return Child(
            "front",
            command,
            self.stack.state / "logs" / "front.log",
            {"HORDE_URL": self.stack.api_url.removesuffix("/api"), **self.environment},
            self.stack.state,
            port=self.stack.front_port,
        )

    def is_ready(self, child: Child) -> bool:
        """Whether it reaches the API."""
        return get_json(f"{self.stack.front_url}/health/ready") is not None


@dataclass
class Worker:
    """The bridge. ``model`` is the name that the API lists once it is ready."""

    stack: Stack
    command: list[str]
    environment: dict[str, str]
    model: str | None = None

    def build(self) -> Child:
        """``horde bridge`` to the backend."""
        return Child(
            "worker",
            self.command,
            self.stack.state / "logs" / "worker.log",
            self.environment,
            self.stack.state,
        )

    def is_ready(self, child: Child) -> bool:
        """Whether the API lists a model that somebody serves."""
        served = get_json(f"{self.stack.api_url}/v2/status/models?type=text") or []
        names = [str(model["name"]) for model in served if model.get("count", 0) >= 1]
        self.model = names[0] if names else None
        return self.model is not None


def build_example(api_url: str, key: str, model: str) -> list[str]:
    """Two commands for a shell: ask, then fetch the reply."""
    body = json.dumps(
        {"model": model, "messages": EXAMPLE_MESSAGES, "temperature": 0, "max_tokens": 64}
    )
    headers = f"-H 'Content-Type: application/json' -H {shlex.quote(f'apikey: {key}')}"
    return [
        f"  curl -s {api_url}/v2/generate/chat/async {headers} -d {shlex.quote(body)}",
        "",
        "It answers with an id; put it in place of ID until done is true:",
        "",
        f"  curl -s {api_url}/v2/generate/chat/status/ID",
    ]


def build_openai_example(front_url: str, key: str, model: str) -> list[str]:
    """A command for a shell: a few lines of Python that print a reply. Not indented, since neither
    END nor Python may be.
    """
    return [
        ".venv/bin/python <<'END'",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{front_url}/v1", api_key={key!r})',
        f"messages = {EXAMPLE_MESSAGES!r}",
        (
            f"reply = client.chat.completions.create(model={model!r}, messages=messages,"
            " temperature=0, max_tokens=64)"
        ),
        "print(reply.choices[0].message.content)",
        "END",
    ]


def describe_stop(state: Path) -> str:
    """The command that stops the stack of a state folder, as typed in this folder."""
    return f"python3 dev.py stop --state {shlex.quote(str(state))}"


@contextlib.contextmanager
def hold_state(state: Path) -> Iterator[None]:
    """Be the one supervisor of a state folder; the kernel lets go when the process ends. Raises
    StartFailed, and CannotRun.
    """
    with open_lock(state) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartFailed(
                f"a stack runs in {state} already; stop it with: {describe_stop(state)}"
            ) from error
        replace_text(lock, str(os.getpid()))
        yield
        replace_text(lock, "")


def open_lock(state: Path) -> IO[str]:
    """The file whose lock the supervisor holds. Raises CannotRun."""
    try:
        return (state / "lock").open("a+")
    except OSError as error:
        raise build_state_refusal(state, error) from error


def replace_text(file: IO[str], text: str) -> None:
    """Write over a file that stays open (and locked)."""
    file.truncate(0)
    file.write(text)
    file.flush()


def read_holder(state: Path) -> int | None:
    """Process id of the supervisor of a state folder, None when none lives."""
    with open_lock(state) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            text = lock.read()
            return int(text) if text else None
    return None


def read_run_file(state: Path) -> dict[str, Any]:
    """run.json, empty when there is none."""
    try:
        found = json.loads((state / "run.json").read_text())
    except FileNotFoundError:
        return {}
    return dict(found)


def run_program(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    """Run one of the project's commands to its end. Returns its stdout. Raises StartFailed with
    what it said.
    """
    answer = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise StartFailed(
            f"`{shlex.join(command)}` ended with"
            f" {answer.returncode}\n{answer.stdout}{answer.stderr}".rstrip()
        )
    return answer.stdout


def get_json(url: str) -> Any:
    """The answer of a GET, None unless it is 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def say(line: str) -> None:
    """Tell the person at the terminal, or the log that stands for it."""
    print(line, flush=True)
