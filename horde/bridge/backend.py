# SPDX-License-Identifier: AGPL-3.0-or-later
"""The backend over HTTP: OpenAI's routes, and the few of llama.cpp and vLLM that tell how many
tokens a prompt has.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from horde.bridge.sse import Event, EventTooLong, iter_events
from horde.json_text import read_json, write_document

CONNECT_TIMEOUT_SECONDS = 10.0
PROBE_TIMEOUT_SECONDS = 10.0
TOKENIZE_TIMEOUT_SECONDS = 30.0

JsonObject = dict[str, Any]

# What backends call a prompt that is too long: llama.cpp's error type, OpenAI's code, and the words
# of vLLM's message.
_OVERFLOW_WORDS = (
    "exceed_context_size_error",
    "context_length_exceeded",
    "maximum context length",
    "context size",
)


class BackendKind(StrEnum):
    """Programs whose extra routes and sampling keys are known."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    OTHER = "other"


class BackendUnavailable(Exception):
    """The backend cannot be reached or did not answer in time; another job would fare no better."""


class BackendRefusal(Exception):
    """The backend answered with an error status, or with a body that is no completion."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message

    @property
    def is_context_overflow(self) -> bool:
        """Whether the prompt was too long."""
        return self.status in (400, 413, 422) and any(
            word in self.message.lower() for word in _OVERFLOW_WORDS
        )

    @property
    def is_grammar_refusal(self) -> bool:
        """Whether a request with a response format failed for that format, as far as the answer
        shows.

        llama.cpp answers 400 to a schema it cannot compile. Some builds fail later with a 500 that
        names the grammar.
        """
        return 400 <= self.status < 500 or any(
            word in self.message.lower() for word in ("grammar", "schema")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A chat's prompt as the backend renders it."""

    token_count: int
    opens_reasoning: bool | None
    """Whether the template itself opens the model's reasoning block; None when the text is not
    known.
    """


class Backend:
    """A connection to one backend; safe for several threads.

    Every call raises ``BackendUnavailable`` or ``BackendRefusal``. ``kind`` is settled by the
    probe.
    """

    def __init__(
        self,
        backend_url: str,
        backend_key: str | None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = backend_url.rstrip("/")
        self._root = self._url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {backend_key}"} if backend_key else {}
        self._client = httpx.Client(headers=headers, transport=transport)

    def list_models(self) -> list[JsonObject]:
        """The entries of ``GET /v1/models``."""
        answer = self._call("GET", f"{self._url}/models", None, PROBE_TIMEOUT_SECONDS)
        data = answer.get("data")
        return (
            [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        )

    def find_props(self) -> JsonObject | None:
        """llama.cpp's ``GET /props``; None where the route does not exist."""
        try:
            return self._call("GET", f"{self._root}/props", None, PROBE_TIMEOUT_SECONDS)
        except BackendRefusal:
            return None

    def chat(self, body: JsonObject, timeout_seconds: float) -> JsonObject:
        """Run a chat completion; the answer as sent."""
        return self._call("POST", f"{self._url}/chat/completions", body, timeout_seconds)

    def open_chat_stream(self, body: JsonObject, timeout_seconds: float) -> "ChatStream":
        """A chat completion to be read piece by piece; it is asked for when the reading begins."""
        return ChatStream(
            self._client, f"{self._url}/chat/completions", body, _build_timeout(timeout_seconds)
        )

    def complete(self, body: JsonObject, timeout_seconds: float) -> JsonObject:
        """Run a text completion; the answer as sent."""
        return self._call("POST", f"{self._url}/completions", body, timeout_seconds)

    def find_chat_prompt(self, kind: BackendKind, body: JsonObject) -> RenderedPrompt | None:
        """Render and count a chat request without running it; None where the backend cannot."""
        if kind is BackendKind.LLAMA_CPP:
            prompt = str(
                self._call(
                    "POST", f"{self._root}/apply-template", body, TOKENIZE_TIMEOUT_SECONDS
                ).get("prompt")
                or ""
            )
            opens_reasoning = prompt.rstrip().endswith("<think>")
            return RenderedPrompt(
                token_count=len(self._tokenize(kind, prompt, body)), opens_reasoning=opens_reasoning
            )
        if kind is BackendKind.VLLM:
            keys = ("model", "messages", "tools", "chat_template_kwargs")
            question = {key: body[key] for key in keys if key in body}
            answer = self._call(
                "POST", f"{self._root}/tokenize", question, TOKENIZE_TIMEOUT_SECONDS
            )
            return RenderedPrompt(token_count=len(_require_tokens(answer)), opens_reasoning=None)
        return None

    def find_text_tokens(self, kind: BackendKind, prompt: str, model: str) -> list[int] | None:
        """The tokens of a bare prompt, special ones included; None where the backend cannot
        tell.
        """
        return None if kind is BackendKind.OTHER else self._tokenize(kind, prompt, {"model": model})

    def close(self) -> None:
        """Close the connections, which also frees the slots of running requests."""
        self._client.close()

    def _tokenize(self, kind: BackendKind, text: str, body: JsonObject) -> list[int]:
        question: JsonObject = {"content": text, "add_special": True, "parse_special": True}
        if kind is BackendKind.VLLM:
            question = {"model": body.get("model"), "prompt": text}
        return _require_tokens(
            self._call("POST", f"{self._root}/tokenize", question, TOKENIZE_TIMEOUT_SECONDS)
        )

    def _call(
        self, method: str, url: str, body: JsonObject | None, timeout_seconds: float
    ) -> JsonObject:
        try:
            response = self._client.request(
                method, url, timeout=_build_timeout(timeout_seconds), **_write_body(body)
            )
        except httpx.ReadTimeout as error:  # longer than the lease of the job
            raise BackendUnavailable(f"no answer within {timeout_seconds:.0f} s") from error
        except httpx.HTTPError as error:
            raise BackendUnavailable(f"{type(error).__name__}: {error}") from error
        return _require_object(response.status_code, response.content)


class ChatStream:
    """One streamed chat completion. ``read_chunks`` runs in one thread; ``abort`` may be called
    from any.
    """

    def __init__(
        self, client: httpx.Client, url: str, body: JsonObject, timeout: httpx.Timeout
    ) -> None:
        self._client, self._url, self._body, self._timeout = client, url, body, timeout
        self._lock = threading.Lock()
        self._response: httpx.Response | None = None
        self._is_aborted = False

    def read_chunks(self) -> Iterator[JsonObject]:
        """The chunks up to ``[DONE]``, or to the end of the answer if a chunk had a finish reason.

        A backend that does not stream and answers whole is read as one chunk. Ends early once
        aborted. Raises ``BackendRefusal`` for an error status and for an error that comes as a
        chunk, and ``BackendUnavailable`` for a stream that breaks off, is silent longer than its
        time-out or cannot be read.
        """
        try:
            with self._client.stream(
                "POST", self._url, timeout=self._timeout, **_write_body(self._body)
            ) as response:
                if not self._enter(response):
                    return
                try:
                    yield from _read_answer(response)
                finally:
                    self._leave()
        except (httpx.HTTPError, EventTooLong) as error:
            if not self._is_aborted:
                raise BackendUnavailable(f"{type(error).__name__}: {error}") from error
        except BackendUnavailable:
            if not self._is_aborted:
                raise

    def abort(self) -> None:
        """End the stream, which makes the backend stop generating and wakes the thread that
        reads.
        """
        with self._lock:
            self._is_aborted = True
            network = (
                self._response.extensions.get("network_stream")
                if self._response is not None
                else None
            )
            connection = network.get_extra_info("socket") if network is not None else None
            if connection is not None:
                with contextlib.suppress(OSError):  # closed by the backend a moment ago
                    # Closing alone would not wake a thread inside recv.
                    connection.shutdown(socket.SHUT_RDWR)

    def _enter(self, response: httpx.Response) -> bool:
        with self._lock:
            self._response = response
            return not self._is_aborted

    def _leave(self) -> None:
        """Let go of the connection: from here on it may carry another job's answer."""
        with self._lock:
            self._response = None


def _read_answer(response: httpx.Response) -> Iterator[JsonObject]:
    """The chunks of an answer whose head has come."""
    if not response.is_success or "json" in response.headers.get("Content-Type", ""):
        yield _build_only_chunk(_require_object(response.status_code, response.read()))
        return
    has_finish_reason = False
    for event in iter_events(response.iter_bytes()):
        if event.data.strip() == "[DONE]":
            return
        chunk = _parse_chunk(event)
        has_finish_reason = has_finish_reason or _has_finish_reason(chunk)
        yield chunk
    if not has_finish_reason:
        raise BackendUnavailable("the stream broke off")


def _parse_chunk(event: Event) -> JsonObject:
    try:
        chunk = read_json(event.data)
    except (ValueError, RecursionError) as error:
        raise BackendUnavailable("a chunk of the stream cannot be read") from error
    if isinstance(chunk, dict) and not event.is_error and chunk.get("error") is None:
        return chunk
    details = chunk.get("error", chunk) if isinstance(chunk, dict) else None
    code = details.get("code") if isinstance(details, dict) else None
    is_status = isinstance(code, int) and 400 <= code <= 599
    raise BackendRefusal(
        int(str(code)) if is_status else httpx.codes.INTERNAL_SERVER_ERROR, _describe_error(chunk)
    )


def _build_only_chunk(completion: JsonObject) -> JsonObject:
    """A whole completion as the only chunk of a stream."""
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise BackendRefusal(httpx.codes.OK, "the answer has no message")
    return {**completion, "choices": [{**choice, "delta": message}]}


def _has_finish_reason(chunk: JsonObject) -> bool:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(choice, dict) and choice.get("finish_reason") is not None


def _write_body(body: JsonObject | None) -> JsonObject:
    """What httpx sends: the client's schemas in the form in which they came, which its own writer
    would change.
    """
    if body is None:
        return {}
    headers = {"Content-Type": "application/json"}
    return {"content": write_document(body).encode(), "headers": headers}


def _build_timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_TIMEOUT_SECONDS, seconds))


def _require_object(status: int, content: bytes) -> JsonObject:
    """The JSON object of a success. Raises ``BackendRefusal`` for anything else."""
    try:
        answer = read_json(content)
    except (ValueError, RecursionError):
        answer = None
    if httpx.codes.is_success(status) and isinstance(answer, dict):
        return answer
    raise BackendRefusal(status, _describe_error(answer))


def _describe_error(answer: object) -> str:
    """Type, code and message of an error body, for the tests above; never the request, which
    backends may echo elsewhere.
    """
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return " ".join(
            str(error[key]) for key in ("type", "code", "message") if error.get(key) is not None
        )
    return error if isinstance(error, str) else ""


def _require_tokens(answer: JsonObject) -> list[int]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise BackendRefusal(200, "the tokenizer's answer has no tokens")
    return tokens
