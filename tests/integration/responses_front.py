# SPDX-License-Identifier: AGPL-3.0-or-later
"""Calls of `/v1/responses` as clients make them, and what must hold of every event of a stream."""

import itertools
import json
from concurrent.futures import Future
from typing import Any, Self

import httpx

from tests.integration._fake_chat_worker import MODEL, Body
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, get_error
from tests.integration.front_streams import OpenStream

PATH = "/v1/responses"
TEXT = "Name one colour."
KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "background", "error"),
    *("incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "metadata"),
    *("model", "output", "parallel_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "service_tier", "store", "temperature", "text"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage", "user", "x_horde"),
}
TOOLS_DECLARED = {"chat_features": ["prompt_overflow_refused", "tools", "vision"]}


def build_request(**changes: Any) -> Body:
    """A response's body; a change to `...` leaves the key out."""
    body = {"model": MODEL, "input": TEXT, "max_output_tokens": 64} | changes
    return {key: value for key, value in body.items() if value is not ...}


def post(
    stack: FrontStack, key: str | None = None, url: str | None = None, **changes: Any
) -> httpx.Response:
    """POST a response and wait for the answer."""
    headers = {"authorization": f"Bearer {key or stack.horde.requester_key}"}
    return stack.call("POST", f"{url or ''}{PATH}", json=build_request(**changes), headers=headers)


def ask(stack: FrontStack, **changes: Any) -> "Future[httpx.Response]":
    """POST in a thread."""
    return stack.threads.submit(post, stack, **changes)


def refuse(stack: FrontStack, **changes: Any) -> tuple[int, str, str | None, str]:
    """(status, code, param, message) of a response that is refused at once."""
    answer = post(stack, **changes)
    error = get_error(answer)
    return answer.status_code, error["code"], error["param"], error["message"]


def respond(
    stack: FrontStack,
    content: str | None = "Blue.",
    *,
    pop: Body | None = None,
    reply: Body | None = None,
    **changes: Any,
) -> tuple[Body, Body]:
    """The response of a request that a worker serves, and the payload that the worker got."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = ask(stack, **changes)
    job = stack.await_job(**(pop or {}))
    answered = stack.horde.reply(job["id"], content, **(reply or {}))
    assert answered.status_code == 200, answered.json
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()), dict(job["payload"])


def get_payload(stack: FrontStack, **changes: Any) -> Body:
    """What a worker with every feature is handed."""
    return respond(stack, pop=TOOLS_DECLARED, **changes)[1]


def build_function(name: str = "lookup_weather", **more: Any) -> Body:
    """A flat function."""
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | more


class ResponseStream(OpenStream):
    """A streamed response, whose events are held to their numbers and names as they are read."""

    def __init__(self, stack: FrontStack, *, url: str | None = None, **changes: Any) -> None:
        super().__init__(stack, url=url, path=PATH, body=build_request(stream=True, **changes))

    @property
    def events(self) -> list[Body]:
        """What was said so far."""
        return read_events(list(self.lines))

    @property
    def kinds(self) -> list[str]:
        """The types of the events so far."""
        return [event["type"] for event in self.events]

    def join(self, key: str = "output_text") -> str:
        """The text of all deltas of a kind."""
        return "".join(
            event["delta"] for event in self.events if event["type"] == f"response.{key}.delta"
        )

    def await_text(self, text: str, key: str = "output_text") -> None:
        """Return once exactly this text is here."""
        super().await_text(text, key)

    def finish(self) -> Self:
        """Read a stream to its proper end."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), self.lines
        assert self.failure is None, self.failure
        assert self.status == 200, self.body
        check_events(self.events)
        return self

    @property
    def response(self) -> Body:
        """The object of the last event."""
        return dict(self.events[-1]["response"])


def read_events(lines: list[str]) -> list[Body]:
    """The events of lines, each named twice and alike."""
    events = []
    for name, data in itertools.pairwise(lines):
        if name.startswith("event: ") and data.startswith("data: "):
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            events.append(event)
    assert "data: [DONE]" not in lines
    return events


ENDS = {"response.completed", "response.incomplete", "response.failed"}


def check_events(events: list[Body], first: int = 0) -> None:
    """Numbers rise by one, one last event, items one behind the other as the SDK wants them."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    ends = [event for event in events if event["type"] in ENDS]
    assert ends == events[-1:]
    if first == 0:
        assert events[0]["type"] == "response.created"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = ends[0]["response"]
    if final["status"] in ("completed", "incomplete") and first == 0:
        assert done == final["output"]
    added = [
        event["output_index"] for event in events if event["type"] == "response.output_item.added"
    ]
    assert added == sorted(set(added))
    deltas = [event for event in events if event["type"].endswith(".delta")]
    assert all(event["delta"] for event in deltas)
