# SPDX-License-Identifier: AGPL-3.0-or-later
"""Where the API's CPU goes, route by route: one thread calls the application in this process,
without HTTP.

Run by hand: `dev.py bench profile_routes [--route pop] [--depth 10000] [--functions 40] [--calls
300]`. CPU of this process only: what Postgres and Redis spend is in their own processes.
"""

import argparse
import collections
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from flask import Flask

from benchmarks._bodies import build_chat_request, build_pop, build_submit, build_text_request
from benchmarks._stack import make_account, own_database, season_workers
from benchmarks._unit import measure_unit_ms
from horde.app import create_app
from horde.config import Config
from horde.database.account_cache import start_account_listener
from horde.logger import configure_logging

SAMPLE_SECONDS = 0.001  # of CPU time
WARM_UP_CALLS = 20
LISTENER_SECONDS = 1.0  # until it has subscribed
ROOT = str(Path(__file__).resolve().parent.parent) + "/"

PACKAGES = (
    ("sqlalchemy/sql/compiler", "sqlalchemy: compile"),
    ("sqlalchemy/sql/", "sqlalchemy: build and cache keys"),
    ("sqlalchemy/orm/", "sqlalchemy: orm"),
    ("sqlalchemy/engine/", "sqlalchemy: engine"),
    ("sqlalchemy/", "sqlalchemy: rest"),
    ("opentelemetry/", "opentelemetry"),
    ("flask_restx/", "flask-restx"),
    ("flask_limiter/", "flask-limiter"),
    ("limits/", "flask-limiter"),
    ("flask/", "flask"),
    ("werkzeug/", "werkzeug"),
    ("redis/", "redis"),
    ("pydantic", "pydantic"),
    ("logging/", "logging"),
    ("horde/", "horde"),
)


@dataclass
class Samples:
    """Counts of CPU samples: by the function that ran, by any function on the stack, by package."""

    total: int = 0
    own: collections.Counter[str] = field(default_factory=collections.Counter)
    within: collections.Counter[str] = field(default_factory=collections.Counter)
    packages: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, frame: FrameType | None) -> None:
        """One sample."""
        self.total += 1
        names = []
        package = None
        while frame is not None:
            names.append(describe_function(frame))
            package = package or find_package(frame.f_code.co_filename)
            frame = frame.f_back
        self.own[names[0]] += 1
        self.packages[package or "standard library"] += 1
        self.within.update(set(names))


def describe_function(frame: FrameType) -> str:
    """`file:function`, short enough for a table."""
    path = frame.f_code.co_filename.removeprefix(ROOT).rpartition("site-packages/")[2]
    return f"{path}:{frame.f_code.co_qualname}"


def find_package(path: str) -> str | None:
    """The package that a frame belongs to; the standard library belongs to whoever calls it, except
    logging.
    """
    short = path.removeprefix(ROOT).rpartition("site-packages/")[2].rpartition("lib/python3.12/")[2]
    return next((name for part, name in PACKAGES if short.startswith(part)), None)


@contextmanager
def sampling(samples: Samples) -> Iterator[None]:
    """Take a sample of the main thread's stack for each millisecond of CPU that the process
    spends.
    """
    signal.signal(signal.SIGPROF, lambda _signal, frame: samples.add(frame))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Caller:
    """Calls the application as gunicorn would, without a socket."""

    def __init__(self, app: Flask, api_key: str) -> None:
        self.app, self.api_key = app, api_key

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The decoded answer; raises RuntimeError unless it is a success."""
        data = b"" if body is None else json.dumps(body).encode()
        environ = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": f"/api/v2{path}",
            "QUERY_STRING": "",
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": "7001",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": "127.0.0.1",
            "HTTP_APIKEY": self.api_key,
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(data)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(data),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
        }
        answered: list[str] = []
        chunks = self.app.wsgi_app(environ, lambda status, _headers: answered.append(status))
        answer = json.loads(b"".join(chunks))
        if answered[0][0] != "2":
            raise RuntimeError(f"{method} {path}: {answered[0]} {answer}")
        return answer


@dataclass(frozen=True)
class Route:
    """A call to measure; `prepare` makes its argument, unmeasured."""

    name: str
    prepare: Callable[[], Any]
    call: Callable[[Any], Any]


def list_routes(client: Caller, worker: Caller) -> list[Route]:
    """The routes a job passes, text first."""

    def request(family: str) -> Any:
        body = build_chat_request("tag") if family == "chat" else build_text_request("tag")
        return client.call("POST", f"/generate/{family}/async", body)

    def pop(name: str = "chat") -> Any:
        return worker.call(
            "POST", "/generate/text/pop", build_pop(f"{name} worker", is_chat=name == "chat")
        )

    def take(family: str) -> Any:
        request(family)
        return build_submit(pop(family))

    def submit(body: Any) -> Any:
        return worker.call("POST", "/generate/text/submit", body)

    def finish(family: str) -> str:
        accepted = request(family)
        submit(build_submit(pop(family)))
        return str(accepted["id"])

    def clear(family: str) -> None:
        while (job := pop(family))["id"] is not None:
            submit(build_submit(job))

    routes = [Route("heartbeat", lambda: None, lambda _: client.call("GET", "/status/heartbeat"))]
    for family in ("text", "chat"):
        routes += [
            Route(
                f"{family} idle pop",
                lambda family=family: clear(family),
                lambda _, family=family: pop(family),
            ),
            Route(f"{family} async", lambda: None, lambda _, family=family: request(family)),
            Route(
                f"{family} pop",
                lambda family=family: request(family),
                lambda _, family=family: pop(family),
            ),
            Route(f"{family} submit", lambda family=family: take(family), submit),
            Route(
                f"{family} status",
                lambda family=family: finish(family),
                lambda wp_id, family=family: client.call(
                    "GET", f"/generate/{family}/status/{wp_id}"
                ),
            ),
        ]
    return routes


def measure(route: Route, calls: int) -> tuple[float, float, Samples]:
    """CPU and wall milliseconds a call, and where the CPU went."""
    for _ in range(WARM_UP_CALLS):
        route.call(route.prepare())
    samples = Samples()
    cpu = wall = 0.0
    # Not sampled: a signal costs some tens of microseconds itself.
    for _ in range(calls):
        argument = route.prepare()
        # Exact also beside the sampling timer.
        cpu_before, wall_before = time.thread_time(), time.perf_counter()
        route.call(argument)
        cpu += time.thread_time() - cpu_before
        wall += time.perf_counter() - wall_before
    for _ in range(calls):
        argument = route.prepare()
        with sampling(samples):
            route.call(argument)
    return cpu / calls * 1000, wall / calls * 1000, samples


def print_samples(samples: Samples, cpu_ms: float, count: int) -> None:
    """Shares of a route's CPU, in milliseconds a call."""
    scale = cpu_ms / max(samples.total, 1)
    print("  by package (the innermost on the stack)")
    for name, number in samples.packages.most_common():
        print(f"    {number * scale:7.3f} ms  {name}")
    print("  by function, with what it calls")
    for name, number in samples.within.most_common(count):
        print(f"    {number * scale:7.3f} ms  {name}")


def main() -> None:
    """Print a table, and for each route asked for the places."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench profile_routes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--route", action="append", default=[], help="part of a route's name; may be given again"
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument(
        "--functions", type=int, default=0, help="rows of the list of functions; 0 leaves it out"
    )
    parser.add_argument("--log", default="/dev/null", help="where the application's log goes")
    arguments = parser.parse_args()
    with own_database(os.environ["DATABASE_URL"]) as environment:
        owner = make_account(environment, "bench-owner")
        payer = make_account(environment, "bench-payer", "--kudos", "1000000000")
        os.environ.update(environment)
        client, worker = build_callers(payer.api_key, owner.api_key, arguments.log)
        for name in ("text", "chat"):
            worker.call(
                "POST", "/generate/text/pop", build_pop(f"{name} worker", is_chat=name == "chat")
            )
        season_workers(environment["DATABASE_URL"])
        print(f"{'route':16} {'CPU ms':>8} {'wall ms':>8} {'units':>8}")
        for route in list_routes(client, worker):
            if arguments.route and not any(part in route.name for part in arguments.route):
                continue
            unit_before = measure_unit_ms()
            cpu_ms, wall_ms, samples = measure(route, arguments.calls)
            unit_ms = (unit_before + measure_unit_ms()) / 2
            print(
                f"{route.name:16} {cpu_ms:8.3f} {wall_ms:8.3f} {cpu_ms / unit_ms:8.2f}", flush=True
            )
            if arguments.functions:
                print_samples(samples, cpu_ms, arguments.functions)


def build_callers(payer_key: str, owner_key: str, log: str) -> tuple[Caller, Caller]:
    """The application in this process, once for each of its users, logging as in production but to
    a file.
    """
    config = Config.from_environment(os.environ)
    configure_logging(config.log_level, config.log_json)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(open(log, "w"))  # noqa: SIM115
    app = create_app(config)
    # As the server does: without news nothing of an account is believed.
    start_account_listener(threading.Event())
    time.sleep(LISTENER_SECONDS)
    return Caller(app, payer_key), Caller(app, owner_key)


if __name__ == "__main__":
    main()
