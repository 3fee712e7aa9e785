# SPDX-License-Identifier: AGPL-3.0-or-later
"""Calls of Anthropic's Messages API at a front, and streams of it as their events."""

import json
from concurrent.futures import Future
from typing import Any

import httpx

from tests.integration._fake_chat_worker import MODEL, Body
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack

PATH = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}
MESSAGE_KEYS = {
    *("id", "type", "role", "model", "content"),
    *("stop_reason", "stop_sequence", "usage", "x_horde"),
}
USAGE_KEYS = {
    *("input_tokens", "cache_creation_input_tokens"),
    *("cache_read_input_tokens", "output_tokens"),
}
TOOL = {
    "name": "lookup_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
IMAGE = (  # one black pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5E"
    "rkJggg=="
)


def build_message(**changes: Any) -> Body:
    """A message's body; a change to `...` leaves the key out."""
    body = {
        "model": MODEL,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Name one colour."}],
    } | changes
    return {key: value for key, value in body.items() if value is not ...}


def post(
    stack: FrontStack,
    body: object = None,
    *,
    path: str = PATH,
    headers: dict[str, str] | None = None,
    **changes: Any,
) -> httpx.Response:
    """POST a body, or the plain message with changes, and wait for the answer."""
    sent = {"x-api-key": stack.horde.requester_key, **VERSION} if headers is None else headers
    data = body if isinstance(body, bytes) else json.dumps(body or build_message(**changes))
    return stack.call("POST", path, content=data, headers=sent)


def ask(stack: FrontStack, **options: Any) -> "Future[httpx.Response]":
    """As `post`, in a thread."""
    return stack.threads.submit(post, stack, **options)


def serve(
    stack: FrontStack,
    content: str | None = "Blue.",
    *,
    pop: Body | None = None,
    reply: Body | None = None,
    **options: Any,
) -> tuple[httpx.Response, Body]:
    """The answer to a message that a worker serves with one reply, and the job's payload."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = ask(stack, **options)
    job = await_job(stack, waiting, **(pop or {}))
    stack.horde.reply(job["id"], content, **(reply or {}))
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer, dict(job["payload"])


def await_job(stack: FrontStack, waiting: "Future[httpx.Response]", **pop: Any) -> Body:
    """The job of a call; fails with the call's answer when it came first."""
    for _ in range(500):
        popped = stack.horde.pop(**pop).json
        if popped["id"] is not None:
            return dict(popped)
        if waiting.done():
            raise AssertionError(waiting.result().text)
    raise AssertionError("no job came")


def complete(stack: FrontStack, content: str | None = "Blue.", **options: Any) -> Body:
    """The message of a call that a worker serves."""
    return dict(serve(stack, content, **options)[0].json())


def get_payload(stack: FrontStack, **options: Any) -> Body:
    """What a worker is given for a call."""
    return serve(stack, **options)[1]


def read_error(answer: httpx.Response) -> dict[str, Any]:
    """The error, held to the shape that every error has."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/json", answer.headers
    assert set(body) == {"type", "error", "request_id"}, body
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message", "details"}, body
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    return dict(body["error"])


def refuse(stack: FrontStack, **options: Any) -> tuple[int, str, str]:
    """(status, type, message) of a call that is refused at once."""
    answer = post(stack, **options)
    error = read_error(answer)
    return answer.status_code, error["type"], error["message"]


def refuse_value(stack: FrontStack, **options: Any) -> str:
    """The message of a call that is refused because of its body."""
    status, kind, message = refuse(stack, **options)
    assert (status, kind) == (400, "invalid_request_error"), message
    return message


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each with its type on a line of its own."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        named, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        events.append(event)
    return events


def join_events(events: list[dict[str, Any]]) -> Body:
    """The message that the events of a stream make."""
    message: Body = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                pieces += delta["partial_json"]
                block["input"] = json.loads(pieces)
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
            message["x_horde"] = event["x_horde"]
    return message
