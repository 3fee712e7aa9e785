# SPDX-License-Identifier: AGPL-3.0-or-later
"""The front on a loopback port before a real native API on another: what tests of the front talk
to.

Requests run in threads of their own, so that the test itself can play the worker meanwhile.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import uvicorn
from flask import Flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from devtools.services import ServiceAddresses
from horde.front_config import FrontConfig
from horde.oai.app import create_front_app
from horde.oai.connection import FrontConnection
from horde.oai.signals import SignalHub
from tests.integration._fake_chat_worker import MODEL, Body, ChatHorde, chat_horde

PATIENCE_SECONDS = 60.0
EXPECTED_COMPLETION_KEYS = {
    "id",
    "object",
    "created",
    "model",
    "choices",
    "usage",
    "system_fingerprint",
    "x_horde",
}


@dataclass(kw_only=True)
class FrontStack:
    """A front, the native API behind it, and the calls a client makes."""

    url: str
    native_url: str
    horde: ChatHorde
    config: FrontConfig
    client: httpx.Client
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One call of the front, awaited."""
        return self.client.request(method, path, **options)

    def post(self, body: object, key: str | None = None, **headers: str) -> httpx.Response:
        """POST a completion and wait for the answer."""
        sent = {"authorization": f"Bearer {key or self.horde.requester_key}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", "/v1/chat/completions", content=data, headers=sent)

    def ask(
        self, key: str | None = None, headers: dict[str, str] | None = None, **changes: Any
    ) -> "Future[httpx.Response]":
        """POST the plain completion with changes, in a thread; a change to None stays in the body
        as null.
        """
        return self.threads.submit(self.post, build_body(**changes), key, **(headers or {}))

    def refuse(self, key: str | None = None, **changes: Any) -> tuple[int, dict[str, Any]]:
        """(status, error object) of a completion that is refused at once."""
        answer = self.post(build_body(**changes), key)
        return answer.status_code, get_error(answer)

    def complete(
        self,
        content: str | None = "Blue.",
        *,
        pop: Body | None = None,
        reply: Body | None = None,
        **changes: Any,
    ) -> Body:
        """The completion of a request that a worker serves with one reply."""
        self.horde.take_nothing(**(pop or {}))
        waiting = self.ask(**changes)
        self.horde.reply(self.await_job(**(pop or {}))["id"], content, **(reply or {}))
        answer = waiting.result(PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def await_job(self, **changes: Any) -> Body:
        """Poll as a worker does until there is a job."""
        return wait_until(lambda: _get_job(self.horde.pop(**changes).json))


def _get_job(popped: Any) -> Body | None:
    assert "id" in popped, popped
    return popped if popped["id"] is not None else None


def wait_until[T](find: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    """What `find` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = find()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def build_body(**changes: Any) -> Body:
    """A completion's body; a change to `...` leaves the key out."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name one colour."}],
        "max_tokens": 64,
    } | changes
    return {key: value for key, value in body.items() if value is not ...}


def build_client(url: str) -> httpx.Client:
    """A client for one front that heeds no proxy."""
    return httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False, verify=False)


def get_error(answer: httpx.Response) -> dict[str, Any]:
    """The error object, held to the keys every error has."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/json", answer.headers
    assert set(body) == {"error"}, body
    assert set(body["error"]) - {"metadata"} == {"message", "type", "param", "code"}, body
    return dict(body["error"])


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    # The name the library calls it by.
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def run_native(app: Flask, port: int = 0) -> Iterator[str]:
    """Serve an API on loopback; its address, without /v2."""
    server: BaseWSGIServer = make_server(
        "127.0.0.1", port, app, threaded=True, request_handler=_QuietHandler
    )
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/api"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def run_front(config: FrontConfig, hub: SignalHub | None = None) -> Iterator[str]:
    """Serve a front on loopback in a thread with a loop of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_front_app(config, hub)
        settings = uvicorn.Config(
            app,
            lifespan="on",
            http=FrontConnection,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(settings)
        serve = partial(
            asyncio.run, server.serve([listener]), loop_factory=settings.get_loop_factory()
        )
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.calls.shut_down()
            server.should_exit = True
            thread.join()


@contextmanager
def run_front_stack(
    service_urls: ServiceAddresses,
    name: str,
    *,
    native: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[FrontStack]:
    """A horde, its API and a front; `native` holds settings of the API, the rest those of the
    front.
    """
    with (
        chat_horde(service_urls, name, **(native or {})) as horde,
        run_native(horde.app) as native_url,
    ):
        config = replace(
            FrontConfig(native_url=native_url, redis_url=None, poll_seconds=0.1), **settings
        )
        with run_front(config) as url, build_client(url) as client:
            stack = FrontStack(
                url=url, native_url=native_url, horde=horde, config=config, client=client
            )
            try:
                yield stack
            finally:
                stack.threads.shutdown()
