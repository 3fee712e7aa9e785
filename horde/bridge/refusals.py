# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a backend says when it does not do what it was asked, and what is to be made of it.

Servers word the same refusal in many ways and give it many statuses. The tests here look for what
the wordings have in common.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import httpx

from horde.json_text import read_json, write_document

OVERLOADED = 529  # of some hosted services
LOGGED_CHARACTERS = 200
# Text of a request is recognised in an error by so many characters in a row.
_ECHO_CHARACTERS = 12

# "the prompt is too long", "input tokens exceed", "requested token count exceeds the model's
# maximum context length", "prompt length 9 is greater than max_seq_len", "`inputs` must have less
# than 9 tokens", and the codes of llama.cpp and OpenAI.
_OVERFLOW = re.compile(
    r"exceed_context_size|context_length_exceeded|string_above_max_length"
    r"|maximum (?:context|prompt|model) length|(?:context|window)[^.]{0,20} exceeded"
    r"|(?:context|prompt|inputs?(?! should)|messages?|token|sequence length)\b.{0,80}?"
    r"(?:exceed|too (?:long|large|many)|(?:longer|greater|more|larger|less) than|over the|"
    r"must (?:be|have) (?:<|less|at most|shorter)|does not fit|doesn't fit|overflow)"
    r"|(?:exceed|too (?:long|large)|longer than|greater than|over(?:flow|ran)|reached)"
    r".{0,80}?(?:context|max_seq_len|max_input|max_num_tokens|prompt|input)"
    r"|too many (?:input |prompt )?tokens|reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE | re.DOTALL,
)
# A quota is no context.
_QUOTA = re.compile(r"per (?:minute|day|hour|second)|rate.?limit|quota|\btpm\b|\brpm\b", re.I)
_GRAMMAR = re.compile(r"grammar|schema|response_format|json_object|structured", re.I)
_NOT_ABOUT_THE_REQUEST = frozenset({401, 402, 403, 405, 408, 409, 429})


class BackendUnavailable(Exception):
    """The backend cannot be reached or did not answer in time; another job would fare no better."""


class UnreadableAnswer(ValueError):
    """The backend answered in a form that the bridge does not know.

    The sentence is for the worker's log and quotes nothing but names of keys and the like.
    """


class BackendRefusal(Exception):
    """The backend answered with an error status, or with a body that is no completion.

    ``message`` is what the backend said, which may repeat the request: it is for the tests below.
    ``retry_after_seconds`` is how long it asks to be left alone.
    """

    def __init__(self, status: int, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"the backend answered {status}")
        self.status, self.message = status, message
        self.retry_after_seconds = retry_after_seconds
        self.is_final = False
        """Whether asking again is out of the question, since a part of the reply is out."""

    @property
    def is_context_overflow(self) -> bool:
        """Whether the prompt was too long."""
        return (
            self.status not in _NOT_ABOUT_THE_REQUEST
            and _OVERFLOW.search(self.message) is not None
            and _QUOTA.search(self.message) is None
        )

    @property
    def is_grammar_refusal(self) -> bool:
        """Whether a request with a response format failed for that format, as far as the answer
        shows.

        llama.cpp answers 400 to a schema it cannot compile. Some builds fail later with a 500 that
        names the grammar.
        """
        return self.status in (400, 422) or (
            self.status not in _NOT_ABOUT_THE_REQUEST and self.names_format
        )

    @property
    def names_format(self) -> bool:
        """Whether the words are about a schema or a format."""
        return _GRAMMAR.search(self.message) is not None

    @property
    def is_overloaded(self) -> bool:
        """Whether the backend asks to be asked again later."""
        has_time = self.retry_after_seconds is not None
        return not self.is_final and (
            self.status in (httpx.codes.TOO_MANY_REQUESTS, OVERLOADED)
            or (self.status == httpx.codes.SERVICE_UNAVAILABLE and has_time)
        )

    def describe(self, texts: Iterable[str] = ()) -> str:
        """The refusal in one line for the log, without what it repeats of the request's texts."""
        said = cut_echo(" ".join(self.message.split()), texts)[:LOGGED_CHARACTERS]
        return f"{self}: {said}" if said else str(self)


def parse_json(content: bytes | str) -> Any:
    """The value; None for what is not JSON."""
    try:
        return read_json(content)
    except (ValueError, RecursionError):
        return None


def join_bounded(parts: Iterable[bytes], max_bytes: int) -> bytes:
    """An answer's body. Raises ``BackendUnavailable`` for a larger one."""
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > max_bytes:
            raise BackendUnavailable(f"an answer of more than {max_bytes} bytes")
    return bytes(body)


class WrittenBody(TypedDict, total=False):
    """Options of httpx for what is sent."""

    content: bytes
    headers: dict[str, str]


def write_body(body: Mapping[str, object] | None) -> WrittenBody:
    """What httpx sends: the client's schemas in the form in which they came, which its own writer
    would change.
    """
    if body is None:
        return {}
    headers = {"Content-Type": "application/json"}
    return {"content": write_document(body).encode(), "headers": headers}


def build_unavailable(error: Exception) -> BackendUnavailable:
    """What the HTTP library found, in words for the log."""
    return BackendUnavailable(describe_failure(error))


def describe_failure(error: Exception) -> str:
    """The class of an error of the HTTP library, and its words where they are about the network:
    those about the protocol may repeat a header, such as the key.
    """
    name = type(error).__name__
    is_of_network = isinstance(error, httpx.NetworkError | httpx.TimeoutException)
    return f"{name}: {error}"[:LOGGED_CHARACTERS] if is_of_network else name


def read_refusal(response: httpx.Response, content: bytes) -> BackendRefusal:
    """The refusal in an answer with its status."""
    answer = parse_json(content)
    if answer is None and "html" not in response.headers.get("Content-Type", ""):
        answer = content[:2000].decode("utf-8", "replace")
    return BackendRefusal(
        response.status_code,
        describe_error(answer),
        parse_retry_after(response.headers.get("Retry-After")),
    )


def find_error(answer: object, *, is_marked: bool = False) -> BackendRefusal | None:
    """The error that came as the body of a success, or as a chunk of a stream."""
    if not isinstance(answer, dict):
        return _build_error(answer) if is_marked else None
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(choice, dict) and choice.get("error"):
        return _build_error(choice["error"])
    is_error = (
        is_marked
        or answer.get("error")
        or answer.get("object") == "error"
        or answer.get("type") == "error"
        or (choices is None and (answer.get("detail") or answer.get("errors")))
        or (choices is None and isinstance(answer.get("message"), str))
    )
    return _build_error(answer.get("error") or answer) if is_error else None


def describe_error(answer: object) -> str:
    """All words of an error body, keys of pydantic's locations included; not what it quotes."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return " ".join(_iter_words(error))[:4000]


def cut_echo(text: str, texts: Iterable[str]) -> str:
    """The text up to where it begins to repeat one of the texts, escaped as JSON or not."""
    said = [" ".join(part.split()) for part in texts]
    haystack = "\n".join((*said, *(json.dumps(part) for part in said)))
    ends = [text.find(part) for part in said if 3 < len(part) <= _ECHO_CHARACTERS]
    ends += (
        start
        for start in range(min(len(text) - _ECHO_CHARACTERS + 1, LOGGED_CHARACTERS))
        if text[start : start + _ECHO_CHARACTERS] in haystack
    )
    end = min((end for end in ends if end >= 0), default=None)
    return text if end is None else text[:end] + "…"


def parse_retry_after(header: str | None) -> float | None:
    """Seconds; the form with a date is not read, since one's own pause serves as well."""
    try:
        seconds = float(header) if header is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def name_safely(value: object) -> str:
    """A backend's word for something, for the log; what looks like no word is not shown."""
    return (
        value
        if isinstance(value, str) and re.fullmatch(r"[\w<>|/.:\[\]-]{1,40}", value, re.ASCII)
        else type(value).__name__
    )


def _build_error(error: object) -> BackendRefusal:
    status = httpx.codes.INTERNAL_SERVER_ERROR.value
    if isinstance(error, dict):
        codes = (str(error.get(key)) for key in ("code", "status", "status_code"))
        status = next((int(code) for code in codes if _is_error_status(code)), status)
    return BackendRefusal(status, describe_error(error))


def _is_error_status(code: str) -> bool:
    return re.fullmatch(r"[45][0-9][0-9]", code) is not None


def _iter_words(error: object) -> Iterable[str]:
    """Strings and numbers, but not an ``input``, where pydantic repeats the value."""
    if isinstance(error, Mapping):
        for key, value in error.items():
            if key not in ("input", "ctx", "traceback", "stack"):
                yield from _iter_words(value)
    elif isinstance(error, list):
        for value in error:
            yield from _iter_words(value)
    elif error is not None:
        yield str(error)
