# SPDX-License-Identifier: AGPL-3.0-or-later
"""The backend over HTTP: OpenAI's routes below its address, other routes beside them."""

import threading
import time

import httpx

from horde.bridge.addresses import hide_password, trusts_environment
from horde.bridge.chat_stream import ChatStream
from horde.bridge.connections import WITHOUT_KEEP_ALIVE, ending_at
from horde.bridge.refusals import (
    BackendRefusal,
    BackendUnavailable,
    build_unavailable,
    find_error,
    join_bounded,
    parse_json,
    read_refusal,
    write_body,
)
from horde.bridge.refused_keys import RefusedKeys
from horde.json_text import JsonObject
from horde.logger import get_logger

CONNECT_TIMEOUT_SECONDS = 10.0
PROBE_TIMEOUT_SECONDS = 10.0
TOKENIZE_TIMEOUT_SECONDS = 30.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024  # the tokens of a prompt of megabytes

# Only these say that a route does not exist. A server that still loads answers otherwise.
NO_ROUTE_STATUSES = frozenset({404, 405, 501})

logger = get_logger(__name__)


class NoSuchRoute(Exception):
    """What answers at the backend's address has no list of models."""


class Backend:
    """A connection to one backend; safe for several threads.

    Every call raises ``BackendUnavailable`` or ``BackendRefusal``.
    """

    def __init__(
        self,
        backend_url: str,
        backend_key: str | None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = backend_url.rstrip("/")
        self._key = backend_key
        headers = {"Authorization": f"Bearer {backend_key}"} if backend_key else {}
        self._client = httpx.Client(
            headers=headers,
            transport=transport,
            trust_env=trusts_environment(backend_url),
            limits=WITHOUT_KEEP_ALIVE,
        )
        self.refused_keys = RefusedKeys()
        self.continues_texts = True
        """Whether it has the route for text jobs, which many services have not; as far as known."""
        self._rest_lock = threading.Lock()
        self._rests_until = 0.0

    @property
    def secrets(self) -> list[str]:
        """What no log may repeat of the backend's words."""
        return [self._key] if self._key else []

    def list_models(self) -> list[JsonObject]:
        """The entries of ``GET /v1/models``. An address without its ``/v1``, or that redirects, is
        corrected.

        Raises ``NoSuchRoute`` where neither address has the route.
        """
        addresses = [self._url] if self._url.endswith("/v1") else [self._url, f"{self._url}/v1"]
        for address in addresses:
            try:
                found, answer = self._ask(
                    "GET", f"{address}/models", None, PROBE_TIMEOUT_SECONDS, follows=True
                )
            except BackendRefusal as refusal:
                if refusal.status not in (*NO_ROUTE_STATUSES, httpx.codes.OK):
                    raise
                continue
            if isinstance(data := answer.get("data"), list):
                self._correct_address(found.removesuffix("/models"))
                return [model for model in data if isinstance(model, dict)]
        raise NoSuchRoute

    def find(self, path: str, body: JsonObject | None = None) -> JsonObject | None:
        """A route beside OpenAI's, asked with POST if there is a body; None where it does not
        exist.
        """
        root = self._url.removesuffix("/v1")
        seconds = PROBE_TIMEOUT_SECONDS if body is None else TOKENIZE_TIMEOUT_SECONDS
        try:
            return self._call("GET" if body is None else "POST", root + path, body, seconds)
        except BackendRefusal as refusal:
            if refusal.status in NO_ROUTE_STATUSES:
                return None
            raise

    def open_chat_stream(self, body: JsonObject, timeout_seconds: float) -> ChatStream:
        """A chat completion to be read piece by piece; it is asked for when the reading begins."""
        return ChatStream(
            self._client, f"{self._url}/chat/completions", body, _build_timeout(timeout_seconds)
        )

    def complete(self, body: JsonObject, timeout_seconds: float) -> JsonObject:
        """Run a text completion; the answer as sent."""
        try:
            return self._call("POST", f"{self._url}/completions", body, timeout_seconds)
        except BackendRefusal as refusal:
            if refusal.status in NO_ROUTE_STATUSES and self.continues_texts:
                self.continues_texts = False
                logger.warning("horde.bridge.texts_not_continued", extra={"status": refusal.status})
            raise

    def forget_refusals(self) -> None:
        """Ask for all again: the backend may be another one."""
        self.refused_keys.clear()
        self.continues_texts = True

    def rest(self, seconds: float) -> None:
        """Remember that the backend asked to be left alone for so long."""
        with self._rest_lock:
            self._rests_until = max(self._rests_until, time.monotonic() + seconds)

    @property
    def rest_seconds(self) -> float:
        """How long it still wants to be left alone."""
        with self._rest_lock:
            return max(self._rests_until - time.monotonic(), 0.0)

    def close(self) -> None:
        """Close the connections, which also frees the slots of running requests."""
        self._client.close()

    def _correct_address(self, address: str) -> None:
        if address != self._url:
            self._url = address
            fields = {"backend": hide_password(address)}
            logger.warning("horde.bridge.backend_address_corrected", extra=fields)

    def _call(
        self, method: str, url: str, body: JsonObject | None, timeout_seconds: float
    ) -> JsonObject:
        return self._ask(method, url, body, timeout_seconds)[1]

    def _ask(
        self,
        method: str,
        url: str,
        body: JsonObject | None,
        timeout_seconds: float,
        *,
        follows: bool = False,
    ) -> tuple[str, JsonObject]:
        """The address the answer came from, which differs after redirects, and the answer."""
        try:
            with (
                ending_at(time.monotonic() + timeout_seconds) as trace,
                self._client.stream(
                    method,
                    url,
                    timeout=_build_timeout(timeout_seconds),
                    extensions={"trace": trace},
                    follow_redirects=follows,
                    **write_body(body),
                ) as response,
            ):
                content = join_bounded(response.iter_bytes(), MAX_ANSWER_BYTES)
        except httpx.ReadTimeout as error:  # longer than the lease of the job
            raise BackendUnavailable(f"no answer within {timeout_seconds:.0f} s") from error
        except httpx.HTTPError as error:
            raise build_unavailable(error) from error
        answer = parse_json(content) if response.is_success else None
        if not isinstance(answer, dict):
            raise read_refusal(response, content)
        if (told := find_error(answer)) is not None:
            raise told
        return str(response.url), answer


def _build_timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_TIMEOUT_SECONDS, seconds))
