# SPDX-License-Identifier: AGPL-3.0-or-later
"""A horde under attack: requests of `tests.fuzz` sent to a real application, and what must hold of
every answer.
"""

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from random import Random
from typing import Any

from flask import Flask
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee
from sqlalchemy import text
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde import image
from horde.apis.responses import JSON_TYPE
from horde.app import RESOURCE_MODULES
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes, UserSharedKey, hash_api_key
from horde.database import caches, users
from horde.database.kudos import fold_postings
from horde.db import transaction
from horde.image import encode_chat_image
from horde.logger import JsonFormatter
from horde.outbound import Network
from horde.return_codes import ReturnCode
from tests.fuzz import KEY_MARK, MARKER, Attack, Attacker, Example
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_call,
    build_chat_body,
    build_chat_submit_body,
    build_faulted_chat_submit_body,
    build_pop_body,
    build_progress_body,
    build_tool,
)
from tests.integration.rows import SECRET, empty_tables, make_user, own_horde
from tests.integration.text_horde import KCPP_AGENT, KNOWN, list_discrepancies, start_clean
from tests.unit.test_image import RED, build_data_url, draw

WIRE_EXAMPLES = Path(__file__).resolve().parent.parent / "data" / "native_wire_examples.json"
LONGEST_SECONDS = 2.0  # of processor time, which a busy machine does not stretch
ANSWERED_SECONDS = 30.0  # for whatever waits instead
PICTURE = build_data_url(draw("RGB", "PNG", RED))
LONGEST_REFUSAL_BYTES = 20_000
RENEW_AFTER = 200  # attacks on the same requests and jobs
WATCHED_TABLES = (
    "waiting_prompts",
    "wp_models",
    "wp_allowed_workers",
    "processing_gens",
    "kudos_reservations",
    "kudos_ledger",
    "kudos_stat_events",
    "kudos_stat_queue",
    "workers",
    "worker_models",
    "users",
    "user_roles",
    "user_sharedkeys",
    "settings",
)
COUNT_ROWS = text(
    "SELECT " + ", ".join(f"(SELECT count(*) FROM {table})" for table in WATCHED_TABLES)
)
ORPHANED_HOLDS = text(
    "SELECT count(*) FROM kudos_reservations WHERE active AND business_id NOT IN (SELECT 'upfront:'"
    " || id FROM waiting_prompts)"
)
STATUSES_WITHOUT_RC = frozenset({405, 413, 415, 429})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
}
ALL_FEATURES = [*ChatFeature, *ChatGuarantee]


class Listener(logging.Handler):
    """Log lines as an operator gets them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(self.format(record))

    def take(self) -> str:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return "\n".join(lines)


@contextmanager
def listening() -> Iterator[Listener]:
    """The log at default levels, heard by a `Listener` beside whatever handles it."""
    listener, root, own = Listener(), logging.getLogger(), logging.getLogger("horde")
    levels = (root.level, own.level)
    root.addHandler(listener)
    root.setLevel(logging.WARNING)
    own.setLevel(logging.INFO)
    try:
        yield listener
    finally:
        root.removeHandler(listener)
        root.setLevel(levels[0])
        own.setLevel(levels[1])


class FuzzHorde:
    """An application with accounts of every kind, requests and jobs to aim at, and a record of what
    was wrong.
    """

    def __init__(self, app: Flask, listener: Listener) -> None:
        self.app, self.listener = app, listener
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.codes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = (0.0, "")
        self._serial = 0
        self._rows: tuple[Any, ...] = ()
        rich = {"kudos": 1_000_000, "concurrency": 500}
        owner_id, owner_key = self._make_user(UserRoleTypes.TRUSTED, worker_invited=20, **rich)
        requester_id, requester_key = self._make_user(**rich)
        self.admin_id, self.admin_key = self._make_user(
            UserRoleTypes.MODERATOR, UserRoleTypes.TRUSTED, **rich
        )
        self.victim_id, self.victim_key = self._make_user(UserRoleTypes.SERVICE, **rich)
        users.state.get().admins = frozenset({self._get_alias(self.admin_id)})
        with transaction() as session:
            sharedkey = UserSharedKey(user_id=requester_id, kudos=5000, name="shared")
            session.add(sharedkey)
            session.flush()
            self.sharedkey = str(sharedkey.id)
        self.chat = ChatHorde(
            app=app,
            owner_id=owner_id,
            owner_key=owner_key,
            requester_id=requester_id,
            requester_key=requester_key,
        )
        self.keys = (
            owner_key,
            requester_key,
            self.admin_key,
            self.victim_key,
            self.sharedkey,
            ANONYMOUS_KEY,
        )
        self.renew()

    def _make_user(self, *roles: UserRoleTypes, **columns: Any) -> tuple[int, str]:
        self._serial += 1
        key = f"{KEY_MARK}-{self._serial}"
        return make_user(*roles, **{"api_key": hash_api_key(key, SECRET)} | columns)[0], key

    @staticmethod
    def _get_alias(user_id: int) -> str:
        with transaction() as session:
            name = session.scalar(
                text("SELECT username FROM users WHERE id = :id"), {"id": user_id}
            )
        return f"{name}#{user_id}"

    def renew(self) -> None:
        """Fresh requests and jobs of every kind, and accounts that may use them."""
        start_clean()
        with transaction() as session:
            session.execute(text("UPDATE users SET usage_multiplier = 1, concurrency = 500"))
            session.execute(
                text("DELETE FROM user_roles WHERE user_role IN ('FLAGGED', 'DELETED')")
            )
            session.execute(text("UPDATE user_sharedkeys SET kudos = 5000, expiry = NULL"))
        users.callers.get().clear()
        chat = self.chat
        declared = {"chat_features": ALL_FEATURES, "threads": 20}
        chat.take_nothing(**declared)
        prompt = [{"role": "user", "content": f"{MARKER} hi"}]
        tool = build_tool(description=MARKER)
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"tools": [tool], "tool_choice": "required"},
            {"tools": [tool], "parallel_tool_calls": False},
            {"response_format": STRICT_FORMAT},
            {"response_format": {"type": "json_object"}},
            {"stream": True},
        )
        self.chat_jobs, self.requests = [], []
        for kind in kinds:
            self.requests.append(chat.queue(messages=prompt, max_tokens=64, **kind))
            self.chat_jobs.append(chat.take(**declared)["id"])
        self.streamed_job = self.chat_jobs[-1]
        worker = {
            "name": "text worker",
            "models": [KNOWN],
            "max_length": 512,
            "max_context_length": 4096,
        }
        self.text_pop = worker | {
            "bridge_agent": KCPP_AGENT,
            "threads": 20,
            "nsfw": True,
            "amount": 1,
        }
        asked = chat.post("/generate/text/pop", self.text_pop, chat.owner_key)
        assert asked.status_code == 200, asked.json
        self.text_jobs = []
        for _ in range(3):
            asked = chat.post(
                "/generate/text/async", {"prompt": MARKER, "models": [KNOWN]}, chat.requester_key
            )
            assert asked.status_code == 202, asked.json
            self.requests.append(asked.json["id"])
            taken = chat.post("/generate/text/pop", self.text_pop, chat.owner_key)
            self.text_jobs.append(taken.json["id"])
            assert taken.json["id"], taken.json
        shown = chat.get("/workers")
        self.workers = [worker["id"] for worker in shown.json]
        self.listener.take()
        self._rows = count_rows()

    def build_attacker(self, random: Random) -> Attacker:
        """An attacker who knows the ids and names that exist."""
        texts = (
            *self.requests,
            *self.chat_jobs,
            *self.text_jobs,
            *self.workers,
            MODEL,
            KNOWN,
            "chat worker",
            "text worker",
        )
        return Attacker(
            random, self.keys, (*texts, str(self.victim_id), self._get_alias(self.victim_id))
        )

    def draw_example(self, random: Random) -> Example:
        """One of the requests that clients, workers and moderators send, with ids that exist."""
        job_id, text_job = random.choice(self.chat_jobs), random.choice(self.text_jobs)
        family, request_id = random.choice(("chat", "text")), random.choice(self.requests)
        worker_key, requester_key = self.chat.owner_key, self.chat.requester_key
        post = [
            Example("POST", path, body, key=requester_key if path.endswith("async") else worker_key)
            for path, body in self.list_posts(job_id, text_job)
        ]
        rare = [
            Example("GET", f"/api/v2/generate/{family}/status/{request_id}"),
            Example("DELETE", f"/api/v2/generate/{family}/status/{request_id}"),
            Example("GET", f"/api/v2/generate/{family}/status/*"),
            Example("DELETE", f"/api/v2/generate/{family}/status/*"),
            Example("GET", "/api/v2/find_user"),
            Example("GET", "/api/v2/users/*"),
            Example("GET", f"/api/v2/users/{self.victim_id}"),
            Example("PUT", f"/api/v2/users/{self.victim_id}", USER_BODY, key=self.admin_key),
            Example(
                "PUT",
                f"/api/v2/users/{self.victim_id}",
                dict([random.choice(tuple(USER_BODY.items()))]),
                key=self.admin_key,
            ),
            Example("GET", "/api/v2/workers", query={"type": "text", "name": "chat worker"}),
            Example("GET", "/api/v2/workers/*"),
            Example("GET", "/api/v2/workers/name/*"),
            Example(
                "PUT", f"/api/v2/workers/{random.choice(self.workers)}", WORKER_BODY, key=worker_key
            ),
            Example(
                "PUT", "/api/v2/workers/*", {"info": "text", "maintenance": False}, key=worker_key
            ),
            Example("DELETE", "/api/v2/workers/*"),
            Example("GET", "/api/v2/status/models", query=MODELS_QUERY),
            Example("GET", "/api/v2/status/models/*"),
            Example("GET", "/api/v2/status/modes"),
            Example(
                "PUT",
                "/api/v2/status/modes",
                {"maintenance_mode": False, "invite_only_mode": False, "raid_mode": False},
                key=self.admin_key,
            ),
            Example("GET", "/api/v2/status/performance"),
            Example("GET", "/api/v2/status/heartbeat"),
            Example(
                "POST", "/api/v2/dev/test-user", {"username": "a", "oauth_id": "a", "kudos": 5}
            ),
            Example("GET", "/api/v2/sharedkeys/*"),
            Example("GET", f"/api/v2/sharedkeys/{self.sharedkey}"),
            Example("PUT", "/api/v2/sharedkeys", SHARED_KEY_BODY, key=self.victim_key),
            Example(
                "PATCH", f"/api/v2/sharedkeys/{self.sharedkey}", SHARED_KEY_BODY, key=requester_key
            ),
            Example("DELETE", "/api/v2/sharedkeys/*", key=self.victim_key),
            Example("GET", "/api/v2/*"),
        ]
        return random.choice(post if random.random() < 0.65 else rare)

    def list_posts(self, job_id: str, text_job: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The bodies of the generate routes: whole ones, small ones and the published ones."""
        yield "/api/v2/generate/chat/async", FULL_CHAT
        yield "/api/v2/generate/chat/async", FULL_CHAT
        yield (
            "/api/v2/generate/chat/async",
            build_chat_body(messages=[{"role": "user", "content": MARKER}], max_tokens=8),
        )
        for urls in ([PICTURE, PICTURE], ["https://pictures.example/a.png", PICTURE]):
            yield (
                "/api/v2/generate/chat/async",
                build_chat_body(messages=build_image_messages(*urls), max_tokens=16),
            )
        yield "/api/v2/generate/text/async", FULL_TEXT
        yield (
            "/api/v2/generate/text/async",
            {"prompt": MARKER, "models": [KNOWN], "params": {"max_length": 16, "n": 2}},
        )
        yield "/api/v2/generate/text/pop", build_pop_body(**FULL_DECLARATION)
        yield "/api/v2/generate/text/pop", self.text_pop
        reply = {
            "finish_reason": "tool_calls",
            "tool_calls": [build_call(arguments=MARKER)],
            "reasoning_content": MARKER,
        }
        counts = {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "reasoning_tokens": 1,
            "native_finish_reason": "eos",
        }
        yield (
            "/api/v2/generate/text/submit",
            build_chat_submit_body(job_id, f'{{"a":"{MARKER}"}}', **reply | counts),
        )
        yield "/api/v2/generate/text/submit", build_chat_submit_body(job_id, '{"a":"aaa"}')
        yield (
            "/api/v2/generate/text/submit",
            build_faulted_chat_submit_body(job_id, fault_reason="prompt_overflow"),
        )
        for streamed in (self.streamed_job, job_id):
            yield "/api/v2/generate/text/progress", build_progress_body(streamed, 1, MARKER, MARKER)
        yield "/api/v2/generate/text/progress", build_progress_body(self.streamed_job, 2, MARKER)
        entry = {"type": "information", "value": "nsfw", "ref": "a"}
        submit = {
            "id": text_job,
            "generation": MARKER,
            "state": "ok",
            "seed": 1,
            "gen_metadata": [entry],
        }
        yield "/api/v2/generate/text/submit", submit
        named = {
            "<model-name>": MODEL,
            "<job-id>": job_id,
            "<worker-name>": "chat worker",
            "<bridge-agent>": KCPP_AGENT,
        }
        for entry in json.loads(WIRE_EXAMPLES.read_text()):
            if entry["kind"] == "request":
                yield entry["path"], fill(entry["body"], named)

    def strike(self, attack: Attack) -> TestResponse | None:
        """Send an attack and note what is wrong with its answer; None for one that no HTTP client
        could send.
        """
        started, worked = time.monotonic(), time.thread_time()
        answer = send(self.app, attack)
        seconds, worked = time.monotonic() - started, time.thread_time() - worked
        if answer is None:
            return None
        self.statuses[
            attack.method if attack.method in ("GET", "POST", "PUT", "DELETE") else "other",
            answer.status_code,
        ] += 1
        if answer.status_code >= 400 and answer.is_json:
            self.codes[str((answer.get_json(silent=True) or {}).get("rc"))] += 1
        name = f"{attack.method} {attack.path[:120]}"
        if seconds > self.slowest[0]:
            self.slowest = (seconds, name)
        wrong = list_faults(attack, answer)
        if worked > LONGEST_SECONDS or seconds > ANSWERED_SECONDS:
            wrong.append(f"took {seconds:.1f} s and {worked:.1f} s of processor time")
        lines = self.listener.take()
        wrong += [
            f"{mark} in the log: {lines[:500]}" for mark in (MARKER, KEY_MARK) if mark in lines
        ]
        rows = count_rows()
        if answer.status_code >= 400 and rows != self._rows:
            pairs = zip(WATCHED_TABLES, self._rows, rows, strict=True)
            wrong.append(f"rows changed: {[pair for pair in pairs if pair[1] != pair[2]]}")
        self._rows = rows
        if wrong:
            self.problems += [
                f"{name} -> {answer.status_code} {fault}\n    {describe(attack, answer)}"
                for fault in wrong
            ]
        if attack.method == "PUT" and answer.status_code == 200:
            self.undo(attack)
        return answer

    def undo(self, attack: Attack) -> None:
        """Take back a change that would have everything after it refused."""
        if "modes" in attack.path:
            start_clean_modes()
        fold_postings()
        self._rows = count_rows()

    def attack(self, random: Random, count: int) -> None:
        """Strike so many times, at fresh targets every now and then."""
        attacker = self.build_attacker(random)
        for number in range(count):
            if number % RENEW_AFTER == RENEW_AFTER - 1:
                self.check_books()
                self.renew()
                attacker = self.build_attacker(random)
            self.strike(attacker.draw(self.draw_example(random)))
        self.check_books()

    def check_books(self) -> None:
        """Every balance is the sum of its postings, and every hold belongs to a request."""
        self.problems += [f"the ledger disagrees: {found}" for found in list_discrepancies()]
        with transaction() as session:
            if orphaned := session.scalar(ORPHANED_HOLDS):
                self.problems.append(f"{orphaned} holds without a request")
        self._rows = count_rows()  # the audit folds the postings first


def build_image_messages(*urls: str) -> list[dict[str, Any]]:
    """A user's message of a text and images."""
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": MARKER}, *images]}]


USER_BODY: dict[str, Any] = {
    "kudos": 10,
    "monthly_kudos": 5,
    "usage_multiplier": 1.5,
    "concurrency": 30,
    "worker_invited": 2,
    "trusted": True,
    "flagged": False,
    "customizer": False,
    "vpn": False,
    "service": True,
    "education": False,
    "special": False,
    "admin_comment": "a comment",
    "public_workers": True,
    "username": "victim",
    "contact": "a@example.com",
    "generate_proxy_passkey": False,
    "undelete": False,
}
WORKER_BODY: dict[str, Any] = {
    "maintenance": False,
    "maintenance_msg": "back soon",
    "paused": False,
    "info": "a worker",
    "name": "chat worker",
    "team": "",
}
SHARED_KEY_BODY: dict[str, Any] = {
    "kudos": 5000,
    "expiry": 30,
    "name": "shared",
    "max_image_pixels": -1,
    "max_image_steps": -1,
    "max_text_tokens": 512,
}
MODELS_QUERY = {
    "type": "text",
    "min_count": "1",
    "max_count": "5",
    "model_state": "all",
    "chat": "true",
}
FULL_DECLARATION: dict[str, Any] = {
    "prompt_jobs": True,
    "nsfw": True,
    "threads": 2,
    "chat_features": ALL_FEATURES,
    "priority_usernames": ["a#1"],
    "chat_limits": {"max_context_length": 8192, "max_length": 1024, "tools_max_temperature": 1},
}
FULL_TEXT: dict[str, Any] = {
    "prompt": MARKER,
    "params": {
        "n": 1,
        "max_length": 80,
        "max_context_length": 2048,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "top_a": 0.0,
        "typical": 1.0,
        "tfs": 1.0,
        "min_p": 0.1,
        "rep_pen": 1.1,
        "rep_pen_range": 320,
        "rep_pen_slope": 0.7,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        "stop_sequence": ["\n"],
        "singleline": False,
        "frmttriminc": False,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "smoothing_factor": 0.0,
        "use_default_badwordsids": False,
        "render_special": False,
    },
    "models": [KNOWN],
    "softprompt": "a",
    "trusted_workers": False,
    "validated_backends": False,
    "slow_workers": True,
    "workers": [],
    "worker_blacklist": False,
    "dry_run": False,
    "extra_source_images": [],
    "disable_batching": False,
    "allow_downgrade": True,
    "webhook": "https://example.com/hook",
    "context_fit": "grow",
}
FULL_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": MARKER, "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": MARKER}]},
        {"role": "assistant", "content": None, "tool_calls": [build_call(arguments=MARKER)]},
        {"role": "tool", "content": MARKER, "tool_call_id": "call_1"},
    ],
    "max_tokens": 64,
    "temperature": 0.5,
    "top_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 1,
    "reasoning_effort": "low",
    "stop": ["a"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "user": MARKER,
    "metadata": {"a": MARKER},
    "tools": [build_tool(description=MARKER, strict=False)],
    "tool_choice": {"type": "function", "function": {"name": "lookup_weather"}},
    "parallel_tool_calls": True,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": SCHEMA, "strict": False},
    },
    "horde": {
        "trusted_workers": False,
        "validated_backends": False,
        "slow_workers": True,
        "max_context_length": 4096,
        "context_fit": "grow",
        "conformance": "strict",
        "openai_guards": False,
        "include_reasoning": True,
        "availability_mode": "wait",
        "max_kudos": 1000,
        "operation_key": "7d1f6a0e-8b0c-4c3e-9a55-0a4b6b7d1c11",
        "dry_run": False,
    },
}


@contextmanager
def fuzz_horde(service_urls: ServiceAddresses, name: str) -> Iterator[FuzzHorde]:
    """The whole API on a database of its own, with everything in it that an attack needs."""
    admins = users.state.get().admins
    with (
        listening() as listener,
        own_horde(service_urls, name, RESOURCE_MODULES, test_apikeys=True) as app,
    ):
        # No name server is asked.
        image.state.get().network = Network(resolve=lambda _host, _port: [ip_address("10.0.0.1")])
        # A helper is running before anything is timed.
        encode_chat_image(base64.b64decode(PICTURE.partition(",")[2]))
        try:
            yield FuzzHorde(app, listener)
        finally:
            users.state.get().admins = admins
            image.configure(server_threads=16)


def start_clean_modes() -> None:
    """No maintenance, no raid."""
    empty_tables("settings")
    caches.clear_all()


def fill(value: Any, names: dict[str, str]) -> Any:
    """A published body with its placeholders filled in, and the marker for each text of a prompt or
    reply.
    """
    if isinstance(value, dict):
        return {
            key: (
                MARKER
                if key in ("content", "text") and isinstance(child, str)
                else fill(child, names)
            )
            for key, child in value.items()
        }
    if isinstance(value, list):
        return [fill(child, names) for child in value]
    return names.get(value, value) if isinstance(value, str) else value


def count_rows() -> tuple[Any, ...]:
    """How many rows each watched table has."""
    with transaction() as session:
        return tuple(session.execute(COUNT_ROWS).one())


def send(app: Flask, attack: Attack) -> TestResponse | None:
    """The answer; None when the test client itself cannot write the request."""
    try:
        return app.test_client().open(
            attack.path,
            method=attack.method,
            query_string=list(attack.query) or None,
            headers=list(attack.headers),
            data=attack.data,
        )
    except (UnicodeEncodeError, ValueError):
        return None


def list_faults(attack: Attack, answer: TestResponse) -> list[str]:
    """What is wrong with an answer, whatever was asked."""
    wrong = []
    body = answer.get_data()
    if answer.status_code >= 500:
        wrong.append("is a server error")
    if 300 <= answer.status_code < 400:
        wrong.append("is a redirect")
    if KEY_MARK.encode() in body or any(KEY_MARK in value for _, value in answer.headers):
        wrong.append("shows a key")
    if answer.status_code < 400 or attack.method == "HEAD":
        return wrong
    if MARKER.encode() in body:
        wrong.append("shows a prompt or reply")
    if len(body) > LONGEST_REFUSAL_BYTES:
        wrong.append(f"has {len(body)} bytes")
    if answer.mimetype != JSON_TYPE:
        return [*wrong, f"is {answer.mimetype}"]
    said = json.loads(body)
    if not isinstance(said.get("message"), str) or not said["message"]:
        wrong.append("has no message")
    if "rc" in said and said["rc"] not in set(ReturnCode):
        wrong.append(f"has the unknown rc {said['rc']}")
    is_unrouted = (
        answer.status_code == 404
        and "rc" not in said
        and said["message"].startswith("The requested URL")
    )
    is_test_route = "dev/test-user" in attack.path and answer.status_code == 404
    if (
        "rc" not in said
        and answer.status_code not in STATUSES_WITHOUT_RC
        and not is_unrouted
        and not is_test_route
    ):
        wrong.append("has no rc")
    errors = said.get("errors", {})
    if not isinstance(errors, dict) or not all(isinstance(error, str) for error in errors.values()):
        wrong.append("has errors that are no texts")
    return wrong


def describe(attack: Attack, answer: TestResponse) -> str:
    """Enough of an attack and its answer to repeat it."""
    sent = b"" if attack.data is None else attack.data
    shown = sent if len(sent) < 1500 else sent[:1500] + b"..."
    headers = {name: value[:80] for name, value in attack.headers if name not in ("Content-Type",)}
    return f"{headers} {attack.query} {shown!r}\n    {answer.get_data()[:400]!r}"
