# SPDX-License-Identifier: AGPL-3.0-or-later
"""One chat completion, read from the backend as it comes: in chunks, or whole as the only chunk."""

from collections.abc import Callable, Iterable, Iterator

import httpx

from horde.bridge.connections import RequestConnections
from horde.bridge.refusals import (
    BackendRefusal,
    BackendUnavailable,
    UnreadableAnswer,
    build_unavailable,
    find_error,
    join_bounded,
    parse_json,
    read_refusal,
    write_body,
)
from horde.bridge.sse import Event, EventTooLong, is_done, iter_events
from horde.json_text import JsonObject

MAX_WHOLE_BYTES = 64 * 1024 * 1024  # a reply and what a server tells about each of its tokens


class ChatStream:
    """One chat completion. ``read_chunks`` runs in one thread; ``abort`` may be called from any."""

    def __init__(
        self, client: httpx.Client, url: str, body: JsonObject, timeout: httpx.Timeout
    ) -> None:
        self._client, self._url, self._body, self._timeout = client, url, body, timeout
        self._connections = RequestConnections()

    def read_chunks(self, on_bytes: Callable[[], object] = lambda: None) -> Iterator[JsonObject]:
        """The chunks up to ``[DONE]``, or to the end of the answer if a chunk had a finish reason.

        A backend that does not stream and answers whole is read as one chunk. ``on_bytes`` is
        called for whatever comes, comments included: a backend that sends them is alive. Ends
        early once aborted. Raises ``BackendRefusal`` for an error status and for an error that
        comes as a chunk, ``UnreadableAnswer`` for what is no completion, and
        ``BackendUnavailable`` for a stream that breaks off or is silent longer than its time-out.
        """
        try:
            with self._client.stream(
                "POST",
                self._url,
                timeout=self._timeout,
                extensions={"trace": self._connections.trace},
                **write_body(self._body),
            ) as response:
                yield from _read_answer(response, on_bytes)
        except (httpx.HTTPError, EventTooLong, BackendUnavailable) as error:
            if self._connections.is_cut:
                return
            if isinstance(error, BackendUnavailable):
                raise
            raise build_unavailable(error) from error
        finally:
            self._connections.close()

    def abort(self) -> None:
        """End the stream, which makes the backend stop generating and wakes the thread that reads,
        also before the head of the answer has come.
        """
        self._connections.cut()


def _read_answer(response: httpx.Response, on_bytes: Callable[[], object]) -> Iterator[JsonObject]:
    """The chunks of an answer whose head has come."""
    parts = _report(response.iter_bytes(), on_bytes)
    if not response.is_success:
        raise read_refusal(response, join_bounded(parts, MAX_WHOLE_BYTES))

    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type == "application/json":
        body = join_bounded(parts, MAX_WHOLE_BYTES)
        if (whole := parse_json(body)) is not None:
            yield from _read_chunk(whole, is_whole=True)
            return
        parts = iter([body])  # events under a wrong name
    yield from _read_events(iter_events(parts))


def _read_events(events: Iterable[Event]) -> Iterator[JsonObject]:
    has_ended = False
    for event in events:
        if is_done(event.data):
            return
        for chunk in _parse_event(event):
            has_ended = has_ended or _has_finish_reason(chunk)
            yield chunk
    if not has_ended:
        raise BackendUnavailable("the stream broke off")


def _report(parts: Iterable[bytes], on_bytes: Callable[[], object]) -> Iterator[bytes]:
    for part in parts:
        on_bytes()
        yield part


def _parse_event(event: Event) -> Iterator[JsonObject]:
    if not event.data.strip():
        return
    value = parse_json(event.data)
    if value is None and event.data.strip() != "null":
        if event.is_error:
            raise BackendRefusal(httpx.codes.INTERNAL_SERVER_ERROR, event.data[:2000])
        raise UnreadableAnswer("a chunk of the stream is not JSON")
    yield from _read_chunk(value, is_error=event.is_error)


def _read_chunk(
    value: object, *, is_error: bool = False, is_whole: bool = False
) -> Iterator[JsonObject]:
    """A chunk that is no error; each of an array's, as some servers send them."""
    if isinstance(value, list):
        for item in value:
            yield from _read_chunk(item, is_error=is_error, is_whole=is_whole)
        return
    if (error := find_error(value, is_marked=is_error)) is not None:
        raise error
    if isinstance(value, dict):
        yield value
    elif value is not None or is_whole:
        raise UnreadableAnswer(f"the answer is {type(value).__name__}, not an object")


def _has_finish_reason(chunk: JsonObject) -> bool:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else chunk
    return isinstance(choice, dict) and bool(choice.get("finish_reason") or choice.get("done"))
