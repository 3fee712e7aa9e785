# SPDX-License-Identifier: AGPL-3.0-or-later
"""A front under attack: requests of `tests.fuzz` over a real connection, and what must hold of
every answer.

A worker serves whatever gets through, so that a body that is accepted ends as a completion.
"""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from devtools.services import ServiceAddresses
from horde.front_config import FrontConfig
from tests.fuzz import KEY_MARK, MARKER, Attack, Attacker, Example
from tests.integration import _fuzz_messages
from tests.integration._fuzz_horde import ALL_FEATURES, FULL_CHAT, FuzzHorde, fuzz_horde
from tests.integration._fuzz_responses import list_response_examples, list_response_stream_faults
from tests.integration.chat_front import run_front, run_native

# Of processor time of front and API together, which a busy machine does not stretch.
LONGEST_SECONDS = 5.0
LONGEST_REFUSAL_BYTES = 20_000
RENEW_AFTER = 500  # attacks on one set of rows
ANSWERED_SECONDS = 30.0
PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
FULL_TEXT = {
    "model": FULL_CHAT["model"],
    "prompt": [MARKER, MARKER],
    "max_tokens": 16,
    "n": 2,
    "best_of": 2,
    "echo": False,
    "stop": ["a", "bb"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {},
    "horde": {"context_fit": "grow", "trusted_workers": False, "dry_run": True},
}
DECLARED = {
    "chat_features": ALL_FEATURES,
    "threads": 20,
    "chat_limits": {"max_context_length": 65536, "max_length": 16384},
}


def list_chat_examples(key: str) -> list[Example]:
    """Bodies that the front serves, and its other routes."""
    whole = FULL_CHAT | {"horde": {"slow_workers": True, "max_kudos": 100_000}}
    plain = {
        "model": FULL_CHAT["model"],
        "messages": [{"role": "user", "content": MARKER}],
        "max_tokens": 16,
    }
    ignored = {
        "user": "a",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "logprobs": False,
        "top_k": 0,
    }
    quote = whole | {"horde": {"dry_run": True}, "stream": False}
    stream = plain | {"stream": True, "stream_options": {"include_usage": True}}
    return [
        *[Example("POST", PATH, quote, key=key)] * 6,
        Example("POST", PATH, whole, key=key),
        Example("POST", PATH, plain | ignored, key=key),
        Example("POST", PATH, stream, key=key),
        Example("GET", "/v1/models", query={"a": "b"}),
        Example("GET", "/v1/models/*"),
        Example("GET", "/v1/*"),
        Example("GET", "/health"),
    ]


def list_completion_examples(key: str) -> list[Example]:
    """Bodies of text completions."""
    stream = {"model": FULL_CHAT["model"], "prompt": "a", "stream": True}
    return [
        *[Example("POST", TEXT_PATH, FULL_TEXT, key=key)] * 3,
        Example("POST", TEXT_PATH, FULL_TEXT | {"prompt": "a", "horde": {}}, key=key),
        Example("POST", TEXT_PATH, stream, key=key),
    ]


FORMS: Mapping[str, Callable[[str], list[Example]]] = MappingProxyType(
    {
        "chat": list_chat_examples,
        "completions": list_completion_examples,
        "responses": list_response_examples,
        "messages": _fuzz_messages.list_message_examples,
    }
)


class FuzzFront:
    """A front, its API, and a record of what was wrong."""

    def __init__(self, horde: FuzzHorde, url: str) -> None:
        self.horde = horde
        self.form: str | None = None  # what alone is attacked, a key of FORMS
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = (0.0, "")
        # Held while the worker works, and while the rows are made anew.
        self.serving = threading.Lock()
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            str(address.hostname), address.port, timeout=ANSWERED_SECONDS
        )

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def list_examples(self) -> list[Example]:
        """What is attacked: the form that was chosen, else all of OpenAI's."""
        key = self.horde.chat.requester_key
        if self.form is not None:
            return FORMS[self.form](key)
        return [
            *list_chat_examples(key),
            *list_completion_examples(key),
            *list_response_examples(key),
        ]

    def attack(self, random: Random, count: int) -> None:
        """Strike so many times."""
        attacker = Attacker(
            random,
            self.horde.keys,
            (*self.horde.workers, FULL_CHAT["model"], "auto", "json_object"),
        )
        for number in range(count):
            if number % RENEW_AFTER == RENEW_AFTER - 1:
                self._connection.close()  # the server would, in the meantime
                with self.serving:
                    self.horde.check_books()
                    self.horde.renew()
                self.problems += self.horde.problems
                self.horde.problems = []
            self.strike(attacker.draw(random.choice(self.list_examples())))

    def strike(self, attack: Attack) -> None:
        """Send one attack and note what is wrong with its answer."""
        started, worked = time.monotonic(), time.process_time()
        answer = self._send(attack)
        if answer is None:
            return
        status, headers, body = answer
        seconds, worked = time.monotonic() - started, time.process_time() - worked
        self.statuses[status] += 1
        if seconds > self.slowest[0]:
            self.slowest = (seconds, f"{attack.method} {attack.path[:80]}")
        wrong = list_faults(attack, status, headers, body)
        if worked > LONGEST_SECONDS:
            wrong.append(f"took {worked:.1f} s of processor time")
        lines = self.horde.listener.take()
        wrong += ["logs a prompt or reply"] * (MARKER in lines) + ["logs a key"] * (
            KEY_MARK in lines
        )
        if status >= 400 and body.startswith(b"{"):
            error = json.loads(body)["error"]
            self.codes[str(error.get("code") or error["details"]["error_code"])] += 1
        if wrong:
            sent = (attack.data or b"")[:1500]
            self.problems.append(
                f"{attack.method} {attack.path[:80]}: {status} {wrong} {sent!r}\n    {body[:400]!r}"
            )

    def _exchange(
        self, attack: Attack, path: str, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """Send it, on a new connection where the server had closed the one that was kept: on a busy
        machine there are more than fifteen seconds between two attacks.
        """
        try:
            self._connection.request(attack.method, path, body=attack.data, headers=headers)
            return self._connection.getresponse()
        except ConnectionError:
            self._connection.close()
        self._connection.request(attack.method, path, body=attack.data, headers=headers)
        return self._connection.getresponse()

    def _send(self, attack: Attack) -> tuple[int, dict[str, str], bytes] | None:
        """Status, headers and body; None for what no HTTP client can send."""
        key = dict(attack.headers).get("apikey")
        headers = {
            name: value for name, value in attack.headers if name not in ("apikey", "Expect")
        }
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        query = "&".join(
            f"{quote(name)}={quote(value.encode('utf-8', 'surrogatepass'))}"
            for name, value in attack.query
        )
        path = quote(attack.path.encode("utf-8", "surrogatepass"), safe="/%?") + (
            f"?{query}" if query else ""
        )
        try:
            response = self._exchange(attack, path, headers)
        except (UnicodeEncodeError, ValueError):
            self._connection.close()
            return None
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )


def list_faults(attack: Attack, status: int, headers: dict[str, str], body: bytes) -> list[str]:
    """What is wrong with an answer, whatever was asked."""
    wrong = []
    if status >= 500 and not is_for_want_of_workers(body):
        wrong.append("is a server error")
    if 300 <= status < 400:
        wrong.append("is a redirect")
    if not headers.get("x-request-id", "").startswith("req_"):
        wrong.append("has no request id")
    if KEY_MARK.encode() in body or any(KEY_MARK in value for value in headers.values()):
        wrong.append("shows a key")
    is_message = _fuzz_messages.is_message_path(attack.path)
    if status < 400:
        return wrong + list_stream_faults(headers, body, is_message=is_message)
    if MARKER.encode() in body:
        wrong.append("shows a prompt or reply")
    if len(body) > LONGEST_REFUSAL_BYTES:
        wrong.append(f"has {len(body)} bytes")
    if attack.method == "HEAD":
        return wrong
    if headers.get("content-type") != "application/json":
        return [*wrong, f"is {headers.get('content-type')}"]
    said = json.loads(body)
    if is_message:
        return wrong + _fuzz_messages.list_error_faults(said)
    error = said.get("error", {})
    if set(said) != {"error"} or set(error) - {"metadata"} != {"message", "type", "param", "code"}:
        wrong.append("has another shape")
    if not isinstance(error.get("message"), str) or not isinstance(error.get("code"), str):
        wrong.append("has no message or code")
    return wrong


def is_for_want_of_workers(body: bytes) -> bool:
    """Whether a request was fine and its refusal is of the workers: there is none that is fast
    enough, or the only one does not write what a schema wants.
    """
    return b'code":"no_worker_available"' in body or (
        b'code":"generation_failed"' in body and b'"rc":"ChatSubmitInvalid"' in body
    )


def list_stream_faults(headers: dict[str, str], body: bytes, *, is_message: bool) -> list[str]:
    """What is wrong with an event stream; nothing for other answers."""
    if not headers.get("content-type", "").startswith("text/event-stream"):
        return []
    if is_message:
        return _fuzz_messages.list_stream_faults(body)
    if body.startswith((b"event: response.", b": ")) and b"[DONE]" not in body:
        return list_response_stream_faults(body)
    events = [
        line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")
    ]
    if not events or events[-1] != b"[DONE]":
        return ["is a stream without an end"]
    errors = [event for event in map(json.loads, events[:-1]) if "error" in event]
    return [f"is a stream that ends with {errors[0]['error']['code']}"] if errors else []


class _Worker(threading.Thread):
    """Serves every job there is until it is stopped."""

    def __init__(self, front: FuzzFront) -> None:
        super().__init__(daemon=True)
        self._chat, self._serving, self._stopped = (
            front.horde.chat,
            front.serving,
            threading.Event(),
        )

    def stop(self) -> None:
        """Serve no more."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Poll and reply; a reply that the request forbids becomes a call, and at last a fault."""
        while not self._stopped.wait(0.01):
            with self._serving:
                popped: Any = self._chat.pop(**DECLARED).json
                if popped.get("id") is not None:
                    self._reply(popped)

    def _reply(self, job: dict[str, Any]) -> None:
        if "messages" not in job["payload"]:
            body = {"id": job["id"], "generation": "aaa", "state": "ok"}
            self._chat.post("/generate/text/submit", body, self._chat.owner_key)
            return
        tools = job["payload"].get("tools") or [{"function": {"name": "none"}}]
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": tools[0]["function"]["name"], "arguments": "{}"},
        }
        if self._chat.reply(job["id"], '{"a":"aaa"}').status_code == 200:
            return
        if (
            self._chat.reply(
                job["id"], None, tool_calls=[call], finish_reason="tool_calls"
            ).status_code
            == 200
        ):
            return
        self._chat.fault(job["id"])


@contextmanager
def fuzz_front(service_urls: ServiceAddresses, name: str) -> Iterator[FuzzFront]:
    """A front before the whole API, with a worker that declares everything."""
    with fuzz_horde(service_urls, name) as horde, run_native(horde.app) as native_url:
        config = FrontConfig(
            native_url=native_url,
            redis_url=None,
            poll_seconds=0.05,
            no_worker_grace_seconds=2.0,
            models_cache_seconds=0.0,
            responses_redis_url=f"{service_urls.redis_url}/9",
            responses_key_secret="a-secret-of-the-tests",
        )
        with run_front(config) as url:
            front = FuzzFront(horde, url)
            worker = _Worker(front)
            worker.start()
            try:
                yield front
            finally:
                worker.stop()
                front.close()
