# SPDX-License-Identifier: AGPL-3.0-or-later
"""The calls a text worker makes: pop a job, post what is written so far, submit what came of it."""

from typing import Any

import httpx

from horde.json_text import read_json

POP_TIMEOUT_SECONDS = 60.0  # a busy horde may hold a pop for some 40 s
SUBMIT_TIMEOUT_SECONDS = 60.0
# A post is answered in milliseconds, and the reply's submit waits for the one under way.
PROGRESS_TIMEOUT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 10.0

JsonObject = dict[str, Any]


class HordeUnavailable(Exception):
    """No usable answer: the network, a time-out, a 5xx, a rate limit, or a body that is not JSON.
    Trying again is right.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class HordeRefusal(Exception):
    """A 4xx of the horde. ``rc`` is its code, empty when it sent none; ``answer`` is the whole
    body.
    """

    def __init__(self, status: int, rc: str, message: str, answer: JsonObject) -> None:
        super().__init__(f"{status} {rc}: {message}")
        self.status, self.rc, self.message, self.answer = status, rc, message, answer


class HordeApi:
    """A worker's connection to one horde; safe for several threads."""

    def __init__(
        self,
        api_url: str,
        api_key: str,
        bridge_agent: str,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"apikey": api_key, "Client-Agent": bridge_agent}
        self._client = httpx.Client(base_url=api_url, headers=headers, transport=transport)

    def pop(self, body: JsonObject) -> JsonObject | None:
        """Ask for a job; None when there is none. Raises ``HordeUnavailable`` or
        ``HordeRefusal``.
        """
        answer = self._post("/v2/generate/text/pop", body, POP_TIMEOUT_SECONDS)
        return answer if answer.get("id") else None

    def post_progress(self, body: JsonObject) -> bool:
        """Post what a streamed job wrote since its last post: ``{id, seq, delta}``. Whether the
        request was cancelled.

        Raises ``HordeUnavailable`` or ``HordeRefusal``; after the former the same body may be sent
        again.
        """
        return (
            self._post("/v2/generate/text/progress", body, PROGRESS_TIMEOUT_SECONDS).get(
                "cancelled"
            )
            is True
        )

    def submit(self, body: JsonObject) -> float:
        """Hand in a reply or a fault; the reward in kudos. Raises ``HordeUnavailable`` or
        ``HordeRefusal``.
        """
        reward = self._post("/v2/generate/text/submit", body, SUBMIT_TIMEOUT_SECONDS).get("reward")
        return float(reward) if isinstance(reward, int | float) else 0.0

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, path: str, body: JsonObject, timeout_seconds: float) -> JsonObject:
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS)
        try:
            response = self._client.post(path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise HordeUnavailable(f"{type(error).__name__}: {error}") from error
        answer = _parse_object(response)
        if response.is_success and answer is not None:
            return answer
        if (
            response.is_client_error
            and response.status_code != httpx.codes.TOO_MANY_REQUESTS
            and answer is not None
        ):
            raise HordeRefusal(
                response.status_code,
                str(answer.get("rc") or ""),
                str(answer.get("message") or answer.get("errors")),
                answer,
            )
        raise HordeUnavailable(
            f"HTTP {response.status_code}", _parse_retry_after(response.headers.get("Retry-After"))
        )


def _parse_object(response: httpx.Response) -> JsonObject | None:
    try:
        answer = read_json(response.content)
    except ValueError:  # a proxy's error page
        return None
    return answer if isinstance(answer, dict) else None


def _parse_retry_after(header: str | None) -> float | None:
    """Seconds; the form with a date is not read, since the own backoff serves as well."""
    return float(header) if header is not None and header.isdecimal() else None
