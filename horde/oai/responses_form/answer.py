# SPDX-License-Identifier: AGPL-3.0-or-later
"""A response as an object, and as the events of a stream in their order.

Source: docs/reference/front_responses.md, "The object" and "Events".
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from horde.json_text import JsonObject
from horde.oai.errors import ErrorAnswer
from horde.oai.forms import ChatAnswer
from horde.oai.mapping import CompletedReply, CompletionHead, Usage, build_usage, build_x_horde
from horde.oai.relay import Delta, DeltaKind, Remainder
from horde.oai.responses_form.output import OutputWriter
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.tools import ToolSet
from horde.oai.sse import KEEP_ALIVE, encode_named_event

RESPONSE_ID_PREFIX: Final = "resp_"
# Clients count events, not comments, before they take a stream for dead.
LONGEST_SILENCE_SECONDS: Final = 60.0
ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
_FAILED_CODES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("no_worker_supports_features", "unbuildable_grammar"), "invalid_prompt")
)
"""Final refusals under the one code that agents do not try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What is fixed before the reply. `created` is in whole Unix seconds.

    `store` and `background` are as in force, `echo` holds the keys that are shown again.
    """

    request_id: str
    created: int
    model: str
    echo: JsonObject
    tools: ToolSet
    not_enforced: tuple[str, ...]
    estimated_prompt_tokens: int
    include_reasoning: bool
    store: bool
    background: bool

    @classmethod
    def of(cls, request: ResponsesRequest, request_id: str, created: int) -> "ResponseHead":
        """The head of a request that the horde took."""
        return cls(
            request_id=request_id,
            created=created,
            model=request.first_model,
            echo=request.echo,
            tools=request.tools,
            not_enforced=tuple(request.tools.list_not_enforced()),
            estimated_prompt_tokens=request.estimated_prompt_tokens,
            include_reasoning=request.include_reasoning,
            store=request.store,
            background=request.background,
        )

    @property
    def response_id(self) -> str:
        """The `id` of the response."""
        return RESPONSE_ID_PREFIX + self.request_id

    @property
    def completion_head(self) -> CompletionHead:
        """What usage and `x_horde` are computed from, for every form."""
        return CompletionHead(
            request_id=self.request_id,
            created=self.created,
            model=self.model,
            estimated_prompt_tokens=self.estimated_prompt_tokens,
            include_reasoning=self.include_reasoning,
            include_usage=True,
        )


def build_response(
    head: ResponseHead, status: str, output: Sequence[JsonObject] = (), **changes: Any
) -> JsonObject:
    """The object; `changes` replace keys of it."""
    return {
        "id": head.response_id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": status,
        "background": head.background,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": list(output),
        **head.echo,
        "service_tier": None,
        "store": head.store,
        "top_logprobs": 0,
        "usage": None,
        **changes,
    }


def build_response_usage(usage: Usage) -> JsonObject:
    """The usage of a completion under this form's names, every detail there."""
    details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {"length": "max_output_tokens", "content_filter": "content_filter"}
)


def build_final_response(
    head: ResponseHead, reply: CompletedReply, output: Sequence[JsonObject], now: float
) -> JsonObject:
    """The object of a reply that came; `now` is in Unix seconds."""
    reason = _REASONS.get(reply.finish_reason)
    x_horde = build_x_horde(head.completion_head, reply)
    if head.not_enforced:
        x_horde["not_enforced"] = list(head.not_enforced)
    return build_response(
        head,
        "completed" if reason is None else "incomplete",
        output,
        completed_at=int(now) if reason is None else None,
        incomplete_details=None if reason is None else {"reason": reason},
        model=reply.model,
        usage=build_response_usage(build_usage(head.completion_head, reply)),
        x_horde=x_horde,
    )


def build_failed_response(
    head: ResponseHead, error: ErrorAnswer, output: Sequence[JsonObject]
) -> JsonObject:
    """The object of a response that failed once it was under way."""
    return build_response(head, "failed", output, error=build_object_error(error))


def build_object_error(error: ErrorAnswer) -> JsonObject:
    """An error as the object holds it."""
    code, metadata = error.code, dict(error.metadata)
    if code in _FAILED_CODES:
        metadata["code"], code = code, _FAILED_CODES[code]
    elif error.status == 429:
        code = "rate_limit_exceeded"
    body: JsonObject = {"code": code, "message": error.message}
    return body | ({"metadata": metadata} if metadata else {})


class ResponseAnswer(ChatAnswer):
    """One response. Events are numbered from `first_number` on.

    `final` is the object once the response has ended.
    """

    def __init__(self, head: ResponseHead, clock: Callable[[], float] = time.monotonic) -> None:
        self.head = head
        self.final: JsonObject | None = None
        self.status = "queued" if head.background else "in_progress"
        self._clock = clock
        self._events: list[JsonObject] = []
        self._writer = OutputWriter(head.request_id, head.tools, self._events.append)
        self._next_number = 0
        self._spoke_at = clock()

    def render(self, reply: CompletedReply) -> JsonObject:
        """The object of a call that does not stream."""
        return self.final or self.complete(reply, None)

    def open(self) -> bytes:
        """The events before any text."""
        self._open()
        return self._write()

    def fill_silence(self) -> bytes:
        """A comment, or after long silence an event that clients count."""
        if self._clock() - self._spoke_at < LONGEST_SILENCE_SECONDS:
            return KEEP_ALIVE
        self._add_lifecycle()
        return self._write()

    def note_running(self) -> bytes:
        """A worker has the job; nothing when that is known, or the response has ended."""
        if self.final is not None:
            return b""
        self._open()
        self._note_running()
        return self._write() if self._events else b""

    def write_deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Events of text that was relayed."""
        self._open()
        self._note_running()
        for delta in deltas:
            self._writer.add_delta(delta)
        return self._write()

    def finish(self, reply: CompletedReply, remainder: Remainder) -> bytes:
        """What is missing of the items, and the object."""
        final = self.final or self.complete(reply, remainder)
        self._events.append({"type": f"response.{final['status']}", "response": final})
        return self._write()

    def cancel(self, reply: CompletedReply | None) -> bytes:
        """The last events of a response that somebody cancelled; `reply` is what came meanwhile,
        shown unless other text was told already.
        """
        self._open()
        if reply is not None and not self._writer.list_items(""):
            self.final = self.complete(reply, None) | {
                "status": "cancelled",
                "completed_at": None,
                "incomplete_details": None,
            }
        else:
            items = self._writer.list_incomplete()
            self.final = build_response(self.head, "cancelled", items)
        self._events.append({"type": "response.failed", "response": self.final})
        return self._write()

    def restore(self, events: Sequence[JsonObject]) -> None:
        """Go on behind these events, which another process wrote."""
        self._next_number = len(events)
        if any(event["type"] == "response.in_progress" for event in events):
            self.status = "in_progress"
        self._writer.restore(events)

    def get_text(self, kind: DeltaKind) -> str:
        """What was told of the reasoning or the content."""
        return self._writer.get_text(kind)

    def fail(self, error: ErrorAnswer) -> bytes:
        """The object with what there is of the output. Its items are not closed."""
        self._open()
        self.final = build_failed_response(self.head, error, self._writer.list_incomplete())
        self._events.append({"type": "response.failed", "response": self.final})
        return self._write()

    def withdraw_storage(self) -> None:
        """Say that the response is not stored after all."""
        self.head = replace(self.head, store=False)

    def complete(self, reply: CompletedReply, remainder: Remainder | None) -> JsonObject:
        """The object of a reply; None for what remains is all of it."""
        if remainder is None:
            reasoning = reply.reasoning if self.head.include_reasoning else None
            remainder = Remainder(reasoning or "", reply.content or "")
        self._open()
        self._note_running()
        self._writer.finish(reply, remainder.reasoning, remainder.content)
        items = self._writer.list_items("completed")
        self.final = build_final_response(self.head, reply, items, time.time())
        return self.final

    def _open(self) -> None:
        """Begin with the events that open every stream."""
        if self._next_number == 0 and not self._events:
            bare = build_response(self.head, self.status)
            kinds = ("response.created", f"response.{self.status}")
            self._events += [{"type": kind, "response": bare} for kind in kinds]

    def _note_running(self) -> None:
        if self.status == "queued":
            self.status = "in_progress"
            self._add_lifecycle()

    def _add_lifecycle(self) -> None:
        """Say once more where the response stands."""
        response = build_response(self.head, self.status, self._writer.list_items("in_progress"))
        self._events.append({"type": f"response.{self.status}", "response": response})

    def _write(self) -> bytes:
        """The bytes of the events so far."""
        written = b"".join(self._number(self._events))
        self._events.clear()
        self._spoke_at = self._clock()
        return written

    def _number(self, events: Iterable[JsonObject]) -> Iterable[bytes]:
        for event in events:
            number, self._next_number = self._next_number, self._next_number + 1
            kind = event["type"]
            yield encode_named_event({"type": kind, "sequence_number": number, **event})
