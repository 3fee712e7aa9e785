# SPDX-License-Identifier: AGPL-3.0-or-later
"""The routes of a job, called in this process as a server would call them, without a socket."""

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import Flask

from benchmarks._bodies import build_chat_request, build_pop, build_submit, build_text_request
from horde.app import create_app
from horde.config import Config
from horde.database.account_cache import start_account_listener
from horde.logger import configure_logging

LISTENER_SECONDS = 1.0  # until it has subscribed


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
        clear(family)  # what an earlier route left waiting would be served in its place
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


def introduce_workers(worker: Caller) -> None:
    """Let the worker of each family pop once."""
    for name in ("text", "chat"):
        body = build_pop(f"{name} worker", is_chat=name == "chat")
        worker.call("POST", "/generate/text/pop", body)
