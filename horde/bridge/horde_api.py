# SPDX-License-Identifier: AGPL-3.0-or-later
"""The calls a text worker makes: pop a job, post what is written so far, submit what came of it."""

from collections.abc import Callable
from typing import Any

import httpx

from horde.bridge.addresses import hide_password, parse_address, trusts_environment
from horde.bridge.pop_lines import PopLines
from horde.bridge.refusals import describe_failure, parse_json, parse_retry_after
from horde.json_text import JsonObject
from horde.logger import get_logger

POP_TIMEOUT_SECONDS = 60.0  # a busy horde may hold a pop for some 40 s
SUBMIT_TIMEOUT_SECONDS = 60.0
# A post is answered in milliseconds, and the reply's submit waits for the one under way.
PROGRESS_TIMEOUT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 10.0
LOOK_TIMEOUT_SECONDS = 10.0
DEFAULT_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)  # httpx's own

POP_PATH = "/v2/generate/text/pop"
_NO_ROUTE_STATUSES = (404, 405, 501)
_HEARTBEAT = "/v2/status/heartbeat"

logger = get_logger(__name__)


class HordeUnavailable(Exception):
    """No usable answer: the network, a time-out, a 5xx, a rate limit, or a body that is not JSON.

    Trying again is right.
    """

    def __init__(
        self,
        message: str,
        retry_after_seconds: float | None = None,
        *,
        is_no_horde: bool = False,
        is_elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.is_no_horde = is_no_horde
        """Whether something answered, but nothing that a horde says."""
        self.is_elsewhere = is_elsewhere
        """Whether it was not the API that was asked, but where that lets workers wait."""


class WrongAddress(Exception):
    """No horde is near the address. The sentence is for the operator."""


class HordeRefusal(Exception):
    """A 4xx of the horde.

    ``rc`` is its code, empty when it sent none; ``answer`` is the whole body.
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
        self._url = api_url.rstrip("/")

        def build_client(limits: httpx.Limits = DEFAULT_LIMITS) -> httpx.Client:
            return httpx.Client(
                headers=headers,
                transport=transport,
                limits=limits,
                trust_env=trusts_environment(api_url),
            )

        self._client = build_client()
        self._lines = PopLines(build_client)
        self._waiting_url: str | None = None  # where the API says that workers may wait

    def pop(
        self, body: JsonObject, timeout_seconds: float = POP_TIMEOUT_SECONDS
    ) -> JsonObject | None:
        """Ask for a job; None when there is none.

        Raises ``HordeUnavailable`` or ``HordeRefusal``.
        """
        return _judge_pop(self._send(self._client.post, POP_PATH, body, timeout_seconds))

    def wait_for_job(self, body: JsonObject, wait_seconds: int) -> tuple[JsonObject | None, bool]:
        """Ask for a job, and to be kept waiting for so long while there is none: the job, and
        whether this horde keeps workers waiting. An API that does not itself names the address that
        does, and the next such call goes there.

        Raises as ``pop``, also once ``stop_waiting`` was called. What the other address refuses,
        the API may grant, so there it is ``HordeUnavailable``.
        """
        elsewhere = self._waiting_url
        try:
            response = self._send(
                self._lines.post,
                POP_PATH,
                body,
                POP_TIMEOUT_SECONDS,
                base_url=elsewhere,
                headers={"Prefer": f"wait={wait_seconds}"},
            )
            answer = _judge_pop(response)
        except (HordeUnavailable, HordeRefusal) as error:
            if elsewhere is None:
                raise
            self._waiting_url = None
            raise HordeUnavailable(str(error), is_elsewhere=True) from error
        is_kept = response.headers.get("Preference-Applied", "").startswith("wait")
        if not is_kept:
            self._waiting_url = self._find_waiting_url(response.headers.get("Horde-Waiting-Pops"))
        return answer, is_kept

    def _find_waiting_url(self, announced: str | None) -> str | None:
        """The address that an API announces; None for one that is no place for a key."""
        if announced is None:
            return None
        try:
            url = parse_address(announced, "Horde-Waiting-Pops")
        except ValueError:
            return None
        if (httpx.URL(self._url).scheme, httpx.URL(url).scheme) == ("https", "http"):
            return None
        logger.info("horde.bridge.waits_at", extra={"url": hide_password(url)})
        return url

    @property
    def has_stopped_waiting(self) -> bool:
        """Whether `stop_waiting` was called."""
        return self._lines.is_cut

    def stop_waiting(self) -> None:
        """End the pops that wait, from any thread: nobody wants their jobs any more."""
        self._lines.cut()

    def post_progress(self, body: JsonObject) -> bool:
        """Post what a streamed job wrote since its last post: ``{id, seq, delta}``. Whether the
        request was cancelled.

        Raises ``HordeUnavailable`` or ``HordeRefusal``; after the former the same body may be sent
        again.
        """
        answer = self._post("/v2/generate/text/progress", body, PROGRESS_TIMEOUT_SECONDS)
        return answer.get("cancelled") is True

    def submit(self, body: JsonObject, timeout_seconds: float = SUBMIT_TIMEOUT_SECONDS) -> float:
        """Hand in a reply or a fault; the reward in kudos.

        Raises ``HordeUnavailable`` or ``HordeRefusal``.
        """
        reward = self._post("/v2/generate/text/submit", body, timeout_seconds).get("reward")
        return float(reward) if isinstance(reward, int | float) else 0.0

    def correct_address(self) -> None:
        """Find the API near the address that was given, and use it from now on.

        Raises ``WrongAddress`` when there is none, and ``HordeUnavailable``.
        """
        root = self._url.split("/", 3)
        given = self._url
        for address in dict.fromkeys((given, f"{given}/api", "/".join(root[:3]) + "/api")):
            response = self._look(address + _HEARTBEAT)
            if response.is_success and isinstance(parse_json(response.content), dict):
                found = str(response.url).removesuffix(_HEARTBEAT)
                if found == given:
                    raise HordeUnavailable("the horde answers, but not its pop")
                self._url = found
                logger.warning(
                    "horde.bridge.api_address_corrected", extra={"api": hide_password(found)}
                )
                return

        models = self._look("/".join(root[:3]) + "/v1/models")
        answer = parse_json(models.content)
        is_front = models.status_code in (200, 401) and isinstance(answer, dict)
        raise WrongAddress(
            "--api is the address of an OpenAI-compatible front; the horde's API is another one,"
            " which ends in /api."
            if is_front
            else "No horde answers at the address of --api, which ends in /api."
        )

    def close(self) -> None:
        """Close the connections."""
        self._lines.close()
        self._client.close()

    def _look(self, url: str) -> httpx.Response:
        """What is there. The key is not sent along: it may not be a horde's."""
        request = self._client.build_request("GET", url, timeout=LOOK_TIMEOUT_SECONDS)
        del request.headers["apikey"]
        try:
            return self._client.send(request, follow_redirects=True)
        except httpx.HTTPError as error:
            raise HordeUnavailable(describe_failure(error)) from error

    def _post(self, path: str, body: JsonObject, timeout_seconds: float) -> JsonObject:
        return _judge(self._send(self._client.post, path, body, timeout_seconds))

    def _send(
        self,
        post: Callable[..., httpx.Response],
        path: str,
        body: JsonObject,
        timeout_seconds: float,
        *,
        base_url: str | None = None,
        **options: Any,
    ) -> httpx.Response:
        timeout = httpx.Timeout(
            timeout_seconds, connect=min(CONNECT_TIMEOUT_SECONDS, timeout_seconds)
        )
        try:
            return post((base_url or self._url) + path, json=body, timeout=timeout, **options)
        except httpx.HTTPError as error:
            raise HordeUnavailable(describe_failure(error)) from error


def _judge_pop(response: httpx.Response) -> JsonObject | None:
    try:
        answer = _judge(response)
    except HordeRefusal as refusal:
        if refusal.rc or refusal.status not in _NO_ROUTE_STATUSES:
            raise
        raise HordeUnavailable(f"HTTP {refusal.status}", is_no_horde=True) from refusal
    return answer if answer.get("id") else None


def _judge(response: httpx.Response) -> JsonObject:
    """The body of an answer. Raises ``HordeUnavailable`` or ``HordeRefusal``."""
    answer = parse_json(response.content)
    if response.is_success and isinstance(answer, dict):
        return answer

    status = response.status_code
    is_limit = status == httpx.codes.TOO_MANY_REQUESTS
    if response.is_client_error and not is_limit and isinstance(answer, dict):
        message = str(answer.get("message") or answer.get("errors"))
        raise HordeRefusal(status, str(answer.get("rc") or ""), message, answer)
    raise HordeUnavailable(
        f"HTTP {status}",
        parse_retry_after(response.headers.get("Retry-After")),
        is_no_horde=status < 400 or status in _NO_ROUTE_STATUSES,
    )
