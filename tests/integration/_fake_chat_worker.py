# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bodies a chat worker sends, and a worker and requester around the application's client.

Nothing here imports the bridge: these bodies are what any worker sends.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde.apis.v2 import base, heartbeat, kobold, workers
from horde.classes.base.user import UserRoleTypes
from horde.database import functions, text_queue
from tests.integration.rows import forget_everything, make_user, own_horde

MODEL = "test/chat-model:Q4_K_M"
BRIDGE_AGENT = "Horde Bridge:1:https://example.com/bridge"
OWNER_KUDOS = 1_000_000

type Body = dict[str, Any]


def build_pop_body(name: str = "chat worker", model: str = MODEL, **changes: Any) -> Body:
    """A pop with a chat declaration; a change to None leaves the key out."""
    body = {
        "name": name,
        "models": [model],
        "bridge_agent": BRIDGE_AGENT,
        "amount": 1,
        "max_context_length": 4096,
        "max_length": 512,
        "chat_jobs": True,
        "chat_features": ["prompt_overflow_refused"],
        "chat_limits": {"max_context_length": 8192, "max_length": 1024},
        "model_id": model,
        "image_transports": ["url", "base64"],
    }
    return _without_nones(body | changes)


def build_chat_submit_body(
    job_id: str, content: str | None = "Blue.", model: str = MODEL, **changes: Any
) -> Body:
    """A reply; `tool_calls` and `reasoning_content` among the changes join the message."""
    message: Body = {"role": "assistant", "content": content}
    message |= {
        key: changes.pop(key) for key in ("tool_calls", "reasoning_content") if key in changes
    }
    body = {
        "id": job_id,
        "message": message,
        "finish_reason": "stop",
        "model_id": model,
        "state": "ok",
    }
    return _without_nones(body | changes)


def build_faulted_chat_submit_body(job_id: str, model: str = MODEL, **changes: Any) -> Body:
    """A fault, with a `fault_reason` among the changes or none."""
    return _without_nones({"id": job_id, "state": "faulted", "model_id": model} | changes)


def build_progress_body(
    job_id: str, seq: int = 1, content: str | None = "Bl", reasoning: str | None = None
) -> Body:
    """A progress post; None leaves the text out."""
    return {
        "id": job_id,
        "seq": seq,
        "delta": _without_nones({"content": content, "reasoning_content": reasoning}),
    }


def build_call(
    name: str = "lookup_weather", call_id: str = "call_1", arguments: str = '{"city":"Oslo"}'
) -> Body:
    """One tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def build_tool(name: str = "lookup_weather", **function: Any) -> Body:
    """One tool definition."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object"}} | function,
    }


def _without_nones(body: Body) -> Body:
    return {key: value for key, value in body.items() if value is not None}


def build_chat_body(model: str = MODEL, **changes: Any) -> Body:
    """A chat request of one user message; a change to None leaves the key out."""
    return _without_nones(
        {"model": model, "messages": [{"role": "user", "content": "Name one colour."}]} | changes
    )


@dataclass(kw_only=True)
class ChatHorde:
    """An application with a worker's owner and a requester, both rich and with keys of their
    own.
    """

    app: Flask
    owner_id: int
    owner_key: str
    requester_id: int
    requester_key: str

    @property
    def client(self) -> FlaskClient:
        """A client without cookies of an earlier one."""
        return self.app.test_client()

    def post(self, path: str, body: object, key: str | None = None, **headers: str) -> TestResponse:
        """POST below /api/v2."""
        sent = headers if key is None else {"apikey": key, **headers}
        # The client's own `json=` would sort the keys.
        return self.client.post(
            f"/api/v2{path}", data=json.dumps(body), content_type="application/json", headers=sent
        )

    def get(self, path: str) -> TestResponse:
        """GET below /api/v2, without a key."""
        return self.client.get(f"/api/v2{path}")

    def submit(
        self, body: Body | None = None, *, key: str | None = None, **changes: Any
    ) -> TestResponse:
        """A chat request as sent, or the plain one with changes."""
        return self.post(
            "/generate/chat/async", body or build_chat_body(**changes), key or self.requester_key
        )

    def queue(self, **changes: Any) -> str:
        """The id of a chat request that was accepted."""
        answer = self.submit(**changes)
        assert answer.status_code == 202, answer.json
        return str(answer.json["id"])

    def pop(self, *, key: str | None = None, **changes: Any) -> TestResponse:
        """A pop with a declaration."""
        return self.post("/generate/text/pop", build_pop_body(**changes), key or self.owner_key)

    def take_nothing(self, **changes: Any) -> None:
        """A pop that declares and finds nothing."""
        answer = self.pop(**changes)
        assert answer.status_code == 200, answer.json
        assert answer.json["id"] is None, answer.json

    def take(self, **changes: Any) -> Body:
        """The job of a pop that has to find one."""
        answer = self.pop(**changes)
        assert answer.status_code == 200, answer.json
        assert answer.json["id"] is not None, answer.json
        return dict(answer.json)

    def serve(self, **request: Any) -> tuple[str, Body]:
        """Queue a request and take its job: the request's id and the pop's answer."""
        self.take_nothing()
        request_id = self.queue(**request)
        return request_id, self.take()

    def reply(self, job_id: str, content: str | None = "Blue.", **changes: Any) -> TestResponse:
        """Submit a reply as the worker's owner."""
        return self.post(
            "/generate/text/submit",
            build_chat_submit_body(job_id, content, **changes),
            self.owner_key,
        )

    def post_progress(
        self,
        job_id: str,
        seq: int = 1,
        content: str | None = "Bl",
        *,
        reasoning: str | None = None,
        key: str | None = None,
    ) -> TestResponse:
        """Post what was generated since the previous post, as the worker's owner."""
        body = build_progress_body(job_id, seq, content, reasoning)
        return self.post("/generate/text/progress", body, self.owner_key if key is None else key)

    def fault(self, job_id: str, **changes: Any) -> TestResponse:
        """Submit a fault as the worker's owner."""
        return self.post(
            "/generate/text/submit",
            build_faulted_chat_submit_body(job_id, **changes),
            self.owner_key,
        )

    def status(self, request_id: str) -> Body:
        """The status of a request that is there; the queue's copy is read anew."""
        text_queue.forget_queue_snapshot()
        answer = self.get(f"/generate/chat/status/{request_id}")
        assert answer.status_code == 200, answer.json
        return dict(answer.json)

    def cancel(self, request_id: str) -> TestResponse:
        """Cancel a request."""
        return self.client.delete(f"/api/v2/generate/chat/status/{request_id}")


@contextmanager
def chat_horde(service_urls: ServiceAddresses, name: str, **settings: Any) -> Iterator[ChatHorde]:
    """A horde with the routes a chat request meets, on a database of its own."""
    with own_horde(service_urls, name, (kobold, base, workers, heartbeat), **settings) as app:
        owner_id, owner_key = make_user(UserRoleTypes.TRUSTED, kudos=OWNER_KUDOS)
        requester_id, requester_key = make_user(kudos=OWNER_KUDOS)
        yield ChatHorde(
            app=app,
            owner_id=owner_id,
            owner_key=owner_key,
            requester_id=requester_id,
            requester_key=requester_key,
        )


def start_anew() -> None:
    """No requests, no workers, and nothing remembered of them."""
    forget_everything()
    functions.forget_cached_availability()
    text_queue.forget_queue_snapshot()
