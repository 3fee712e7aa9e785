# SPDX-License-Identifier: AGPL-3.0-or-later
"""The native API as the front calls it: submit, read, cancel, the list of models, and pops of
workers.

Transport errors and everything the API never answers become `NativeUnavailable`, definite refusals
`NativeRefused`. Source: docs/reference/chat_front.md, "Calls to the native API".
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NotRequired, TypedDict, cast

from horde import metrics
from horde.front_config import FrontConfig
from horde.json_text import JsonObject
from horde.logger import get_logger
from horde.oai.errors import NativeRefused, NativeUnavailable
from horde.oai.http import HeaderPairs, HttpAnswer, HttpClient, HttpFailure

logger = get_logger(__name__)

REACHABLE_SECONDS: Final = 5.0
SUBMIT_READ_SECONDS: Final = 60.0  # the API fetches image URLs meanwhile
READ_SECONDS: Final = 15.0
CANCEL_SECONDS: Final = 15.0
# Before the second and third attempt; the last one holds for further ones.
SUBMIT_RETRY_SECONDS: Final = (0.5, 1.0)
SUBMIT_CONNECTIONS: Final = 128  # some wait for images
STATUS_CONNECTIONS: Final = 32  # reads are quick
POP_CONNECTIONS: Final = 64  # a busy API answers them late
POP_SECONDS: Final = 60.0
POP_PATH: Final = "/v2/generate/text/pop"
REPLY_PATH: Final = "/v2/generate/text/submit"
MODELS_PATH: Final = "/v2/status/models?type=text"
_REQUEST_ID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")  # it becomes part of paths and channel names
_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})


class NativeOffer(TypedDict, total=False):
    """What the API's list of models says of chat; lengths are tokens."""

    features: list[str]
    created: int
    max_context_length: int
    max_length: int
    workers: int


class NativeModel(TypedDict):
    """An entry of the API's list of models."""

    name: str
    queued: NotRequired[float]
    chat: NotRequired[NativeOffer | None]


class NativeBusy(Exception):
    """The API limits reads; `retry_after_seconds` is None when it did not say for how long."""

    def __init__(self, retry_after_seconds: float | None) -> None:
        super().__init__("native 429")
        self.retry_after_seconds = retry_after_seconds


class NativeGone(Exception):
    """The API knows no such request."""

    def __init__(self, rc: str) -> None:
        super().__init__(rc)
        self.rc = rc


class _Ambiguous(Exception):
    """A submit that may or may not have been taken."""


@dataclass(frozen=True, slots=True)
class NativeFamily:
    """Requests of one kind. `is_repeatable`: they carry an operation key, so that one whose answer
    was lost may be sent again.
    """

    path: str
    is_repeatable: bool


CHAT: Final = NativeFamily("/v2/generate/chat", is_repeatable=True)


@dataclass(frozen=True, slots=True, repr=False)
class Caller:
    """On whose behalf the API is called; `api_key` is latin-1 text, as headers are."""

    api_key: str | None
    client_agent: str | None
    address: str | None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submit that was taken: `request_id` is None for a dry run, whose quote is the body.

    `rate_limits` are headers for the client, from those of the API.
    """

    request_id: str | None
    body: Mapping[str, object]
    rate_limits: Mapping[str, str]


class NativeClient:
    """Calls of one process over kept connections. Safe for any number of tasks of one loop."""

    def __init__(self, config: FrontConfig) -> None:
        self._config = config
        # Apart, so that submits that wait for images hold up no read.
        self._submits = HttpClient(config.native_url, SUBMIT_CONNECTIONS)
        self._reads = HttpClient(config.native_url, STATUS_CONNECTIONS)
        self._pops = HttpClient(config.native_url, POP_CONNECTIONS)

    async def close(self) -> None:
        """Close the connections."""
        await self._submits.close()
        await self._reads.close()
        await self._pops.close()

    async def submit(
        self, body: bytes, caller: Caller, deadline: float, family: NativeFamily = CHAT
    ) -> Submitted:
        """Queue a request; `deadline` is monotonic.

        Raises NativeRefused, or NativeUnavailable when no attempt was answered.
        """
        attempts = self._config.submit_attempts if family.is_repeatable else 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(
                    SUBMIT_RETRY_SECONDS[min(attempt, len(SUBMIT_RETRY_SECONDS)) - 1]
                )
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            try:
                response = await self._submit_once(body, caller, remaining, family)
            except _Ambiguous as error:
                logger.warning(
                    "horde.oai.submit_ambiguous",
                    extra={"attempt": attempt + 1, "error_class": str(error)},
                )
                continue
            if attempt:
                metrics.oai_submit_retries.add(1, {"outcome": "recovered"})
            return _parse_submit(response)
        metrics.oai_submit_retries.add(1, {"outcome": "failed"})
        raise NativeUnavailable("no attempt was answered")

    async def _submit_once(
        self, body: bytes, caller: Caller, remaining: float, family: NativeFamily
    ) -> HttpAnswer:
        headers = [*self._build_headers(caller), (b"content-type", b"application/json")]
        try:
            async with asyncio.timeout(min(SUBMIT_READ_SECONDS, remaining)):
                response = await self._submits.call("POST", f"{family.path}/async", headers, body)
        except (HttpFailure, TimeoutError) as error:
            raise _Ambiguous(_describe(error)) from None
        if response.status_code in _GATEWAY_STATUSES and "rc" not in (
            _parse_object(response) or {}
        ):
            raise _Ambiguous(f"status {response.status_code}")
        return response

    async def read_status(
        self, request_id: str, caller: Caller, deadline: float, family: NativeFamily = CHAT
    ) -> Mapping[str, object]:
        """The status of a request. Raises NativeGone, NativeBusy or NativeUnavailable."""
        seconds = min(max(deadline - time.monotonic(), 0.0), READ_SECONDS)
        return await self._call_status("GET", request_id, caller, seconds, family)

    async def cancel(
        self, request_id: str, caller: Caller, family: NativeFamily = CHAT
    ) -> Mapping[str, object]:
        """End a request; its last status. Raises NativeGone, NativeBusy or NativeUnavailable."""
        return await self._call_status("DELETE", request_id, caller, CANCEL_SECONDS, family)

    async def _call_status(
        self, method: str, request_id: str, caller: Caller, seconds: float, family: NativeFamily
    ) -> Mapping[str, object]:
        response = await self._call(
            method, f"{family.path}/status/{request_id}", self._build_headers(caller), seconds
        )
        body = _parse_object(response)
        if (
            response.status_code == 200
            and body is not None
            and isinstance(body.get("generations"), list)
        ):
            return body
        if response.status_code == 429:
            raise NativeBusy(_parse_seconds(response.headers.get("retry-after")))
        # A page of a proxy is no word of the API about the request.
        rc = None if body is None else body.get("rc")
        if response.status_code == 404 and isinstance(rc, str):
            raise NativeGone(rc)
        raise NativeUnavailable(f"status {response.status_code}")

    async def pop(self, headers: HeaderPairs, body: bytes) -> HttpAnswer:
        """A worker's pop, passed on as it came; whatever the API says of it. Raises
        NativeUnavailable for what no API says.
        """
        return await self._call_for_worker(POP_PATH, headers, body)

    async def submit_reply(self, headers: HeaderPairs, body: bytes) -> HttpAnswer:
        """A worker's reply or fault, as `pop`."""
        return await self._call_for_worker(REPLY_PATH, headers, body)

    async def _call_for_worker(self, path: str, headers: HeaderPairs, body: bytes) -> HttpAnswer:
        try:
            async with asyncio.timeout(POP_SECONDS):
                answer = await self._pops.call("POST", path, headers, body)
        except (HttpFailure, TimeoutError) as error:
            raise NativeUnavailable(_describe(error)) from None
        if not answer.headers.get("content-type", "").startswith("application/json"):
            raise NativeUnavailable(f"status {answer.status_code}")  # a page of a gateway
        return answer

    async def list_models(self, *, for_chat: bool = True) -> list[NativeModel]:
        """Entries of the chat models, or of all text models, online now.

        Raises NativeUnavailable.
        """
        path = f"{MODELS_PATH}&chat=true" if for_chat else MODELS_PATH
        response = await self._call("GET", path, self._build_headers(None), READ_SECONDS)
        entries = _parse_json(response)
        if response.status_code != 200 or not isinstance(entries, list):
            raise NativeUnavailable(f"status {response.status_code}")
        named = [
            entry
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]
        return cast(list[NativeModel], named)

    async def is_reachable(self) -> bool:
        """Whether the API answers its heartbeat."""
        with contextlib.suppress(NativeUnavailable):
            response = await self._call(
                "GET", "/v2/status/heartbeat", self._build_headers(None), REACHABLE_SECONDS
            )
            return response.status_code == 200
        return False

    async def _call(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], seconds: float
    ) -> HttpAnswer:
        try:
            async with asyncio.timeout(seconds):
                return await self._reads.call(method, path, headers)
        except (HttpFailure, TimeoutError) as error:
            raise NativeUnavailable(_describe(error)) from None

    def _build_headers(self, caller: Caller | None) -> list[tuple[bytes, bytes]]:
        """Who asks, and for whom: the address goes along only with the passkey that makes it
        believed.
        """
        agent = (
            caller.client_agent
            if caller is not None and caller.client_agent
            else self._config.client_agent
        )
        headers = [("client-agent", agent), ("accept", "application/json")]
        if caller is not None and caller.api_key is not None:
            headers.append(("apikey", caller.api_key))
        if self._config.proxy_passkey:
            headers.append(("proxy-authorization", self._config.proxy_passkey))
            if caller is not None and caller.address:
                headers.append(("proxied-for", caller.address))
        return [
            (name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers
        ]


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parse_json(response: HttpAnswer) -> object:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def _parse_object(response: HttpAnswer) -> JsonObject | None:
    value = _parse_json(response)
    return value if isinstance(value, dict) else None


def _parse_submit(response: HttpAnswer) -> Submitted:
    body = _parse_object(response)
    if response.status_code in {200, 202} and body is not None:
        request_id = body.get("id")
        limits = _parse_rate_limits(response.headers)
        if isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id):
            return Submitted(request_id, body, limits)
        is_quote = response.status_code == 200 and isinstance(body.get("resolved"), dict)
        if request_id is None and is_quote:
            return Submitted(None, body, limits)
    if body is None and response.status_code == 429:
        body = {}  # a gateway's own limit, whatever it says in its page
    if response.status_code < 400 or body is None:
        raise NativeUnavailable(f"status {response.status_code}")
    limits = _parse_rate_limits(response.headers)
    raise NativeRefused(response.status_code, body, response.headers.get("retry-after"), limits)


_RATE_LIMIT_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "x-ratelimit-limit": "x-ratelimit-limit-requests",
        "x-ratelimit-remaining": "x-ratelimit-remaining-requests",
    }
)


def _parse_rate_limits(headers: Mapping[str, str]) -> dict[str, str]:
    """OpenAI's headers for those the API sent; its moment of the reset becomes a duration."""
    found = {name: headers[sent] for sent, name in _RATE_LIMIT_HEADERS.items() if sent in headers}
    reset = _parse_seconds(headers.get("x-ratelimit-reset"))
    if reset is not None:
        found["x-ratelimit-reset-requests"] = f"{max(round(reset - time.time()), 0)}s"
    return found


def _parse_seconds(text: str | None) -> float | None:
    """A number of seconds in a header; None for none and for a date."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
