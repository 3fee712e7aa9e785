# SPDX-License-Identifier: AGPL-3.0-or-later
"""The backend over HTTP: OpenAI's routes, and the few of llama.cpp and vLLM that tell how many tokens a prompt has."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

CONNECT_TIMEOUT_SECONDS = 10.0
PROBE_TIMEOUT_SECONDS = 10.0
TOKENIZE_TIMEOUT_SECONDS = 30.0

JsonObject = dict[str, Any]

# What backends call a prompt that is too long: llama.cpp's error type, OpenAI's code, and the words of vLLM's message.
_OVERFLOW_WORDS = ("exceed_context_size_error", "context_length_exceeded", "maximum context length", "context size")


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
        return self.status in (400, 413, 422) and any(word in self.message.lower() for word in _OVERFLOW_WORDS)

    @property
    def is_grammar_refusal(self) -> bool:
        """Whether a request with a response format failed for that format, as far as the answer shows.

        llama.cpp answers 400 to a schema it cannot compile. Some builds fail later with a 500 that names the grammar.
        """
        return 400 <= self.status < 500 or any(word in self.message.lower() for word in ("grammar", "schema"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A chat's prompt as the backend renders it."""

    token_count: int
    opens_reasoning: bool | None
    """Whether the template itself opens the model's reasoning block; None when the text is not known."""


class Backend:
    """A connection to one backend; safe for several threads.

    Every call raises ``BackendUnavailable`` or ``BackendRefusal``. ``kind`` is settled by the probe.
    """

    def __init__(self, backend_url: str, backend_key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = backend_url.rstrip("/")
        self._root = self._url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {backend_key}"} if backend_key else {}
        self._client = httpx.Client(headers=headers, transport=transport)

    def list_models(self) -> list[JsonObject]:
        """The entries of ``GET /v1/models``."""
        answer = self._call("GET", f"{self._url}/models", None, PROBE_TIMEOUT_SECONDS)
        data = answer.get("data")
        return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []

    def find_props(self) -> JsonObject | None:
        """llama.cpp's ``GET /props``; None where the route does not exist."""
        try:
            return self._call("GET", f"{self._root}/props", None, PROBE_TIMEOUT_SECONDS)
        except BackendRefusal:
            return None

    def chat(self, body: JsonObject, timeout_seconds: float) -> JsonObject:
        """Run a chat completion; the answer as sent."""
        return self._call("POST", f"{self._url}/chat/completions", body, timeout_seconds)

    def complete(self, body: JsonObject, timeout_seconds: float) -> JsonObject:
        """Run a text completion; the answer as sent."""
        return self._call("POST", f"{self._url}/completions", body, timeout_seconds)

    def find_chat_prompt(self, kind: BackendKind, body: JsonObject) -> RenderedPrompt | None:
        """Render and count a chat request without running it; None where the backend cannot."""
        if kind is BackendKind.LLAMA_CPP:
            prompt = str(self._call("POST", f"{self._root}/apply-template", body, TOKENIZE_TIMEOUT_SECONDS).get("prompt") or "")
            opens_reasoning = prompt.rstrip().endswith("<think>")
            return RenderedPrompt(token_count=len(self._tokenize(kind, prompt, body)), opens_reasoning=opens_reasoning)
        if kind is BackendKind.VLLM:
            keys = ("model", "messages", "tools", "chat_template_kwargs")
            question = {key: body[key] for key in keys if key in body}
            answer = self._call("POST", f"{self._root}/tokenize", question, TOKENIZE_TIMEOUT_SECONDS)
            return RenderedPrompt(token_count=len(_require_tokens(answer)), opens_reasoning=None)
        return None

    def find_text_tokens(self, kind: BackendKind, prompt: str, model: str) -> list[int] | None:
        """The tokens of a bare prompt, special ones included; None where the backend cannot tell."""
        return None if kind is BackendKind.OTHER else self._tokenize(kind, prompt, {"model": model})

    def close(self) -> None:
        """Close the connections, which also frees the slots of running requests."""
        self._client.close()

    def _tokenize(self, kind: BackendKind, text: str, body: JsonObject) -> list[int]:
        question: JsonObject = {"content": text, "add_special": True, "parse_special": True}
        if kind is BackendKind.VLLM:
            question = {"model": body.get("model"), "prompt": text}
        return _require_tokens(self._call("POST", f"{self._root}/tokenize", question, TOKENIZE_TIMEOUT_SECONDS))

    def _call(self, method: str, url: str, body: JsonObject | None, timeout_seconds: float) -> JsonObject:
        timeout = httpx.Timeout(timeout_seconds, connect=min(CONNECT_TIMEOUT_SECONDS, timeout_seconds))
        try:
            response = self._client.request(method, url, json=body, timeout=timeout)
        except httpx.ReadTimeout as error:  # longer than the lease of the job
            raise BackendUnavailable(f"no answer within {timeout_seconds:.0f} s") from error
        except httpx.HTTPError as error:
            raise BackendUnavailable(f"{type(error).__name__}: {error}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        raise BackendRefusal(response.status_code, _describe_error(answer))


def _describe_error(answer: object) -> str:
    """Type, code and message of an error body, for the tests above; never the request, which backends may echo elsewhere."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return " ".join(str(error[key]) for key in ("type", "code", "message") if error.get(key) is not None)
    return error if isinstance(error, str) else ""


def _require_tokens(answer: JsonObject) -> list[int]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise BackendRefusal(200, "the tokenizer's answer has no tokens")
    return tokens
