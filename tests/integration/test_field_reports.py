# SPDX-License-Identifier: AGPL-3.0-or-later
"""Problems people reported of servers that do the same job, as cases against the native routes.

Each test is one report. What the other chat modules hold in full is asserted here by its outcome
alone.
"""

import gzip
import json
import logging
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest
from flask.testing import FlaskClient
from redis import Redis
from sqlalchemy import func, select, update

from devtools.services import ServiceAddresses
from horde import metrics, redis_ctrl
from horde.chat_progress import build_lease_key
from horde.circuit_breaker import CircuitBreaker
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import UserRoleTypes, UserSharedKey
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.clock import utcnow
from horde.database import threads
from horde.database.caches import clear_all
from horde.db import transaction
from horde.logger import JsonFormatter
from horde.model_reference import list_text_model_names
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_call,
    build_chat_body,
    build_chat_submit_body,
    build_tool,
    chat_horde,
    start_anew,
)
from tests.integration.instruments import get_reader, read_figures
from tests.integration.rows import make_user
from tests.integration.text_horde import change_worker, list_discrepancies, require_worker

KNOWN_MODEL = list_text_model_names()[0]
MARKER = "MARKER-7f3a"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "field_reports") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    """A worker is online that declares nothing but the guarantee every strict request needs."""
    start_anew()
    module_horde.take_nothing()
    return module_horde


def count_requests() -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(WaitingPrompt)) or 0


def send_raw(
    horde: ChatHorde, data: bytes, content_type: str | None = "application/json", **headers: str
) -> Any:
    headers = {"apikey": horde.requester_key, **headers}
    return horde.client.post(
        "/api/v2/generate/chat/async", data=data, content_type=content_type, headers=headers
    )


def read_status(horde: ChatHorde, request_id: str) -> tuple[int, int, int]:
    """(waiting, processing, finished) of a request."""
    status = horde.status(request_id)
    return status["waiting"], status["processing"], status["finished"]


def let_pass(job_id: str, seconds: float) -> None:
    """Let a job's pop, in Postgres and on Redis, be so many seconds further in the past."""
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.id == UUID(job_id))
            .values(start_time=ProcessingGeneration.start_time - timedelta(seconds=seconds))
        )

    def age(client: Redis) -> None:
        key = build_lease_key(job_id)
        started = client.hget(key, "started")
        if started is not None:
            client.hset(key, "started", str(float(started) - seconds))  # type: ignore[arg-type]
            client.pexpire(key, max(1, client.pttl(key) - round(seconds * 1000)))

    redis_ctrl.call(redis_ctrl.chat_signal_db, age)


# FR-01


def test_a_worker_that_overruns_is_told_the_real_limit(horde: ChatHorde) -> None:
    horde.queue()
    job = horde.take()
    assert job["ttl"] == 150
    let_pass(job["id"], 150 + 60)
    threads.check_waiting_prompts()
    answer = horde.reply(job["id"])
    assert (answer.status_code, answer.json["rc"]) == (400, "AbortedGen")
    assert "150 seconds" in answer.json["message"]
    assert job["id"] in answer.json["message"]


def test_a_slow_worker_gets_what_it_can_finish_in_its_lease(horde: ChatHorde) -> None:
    change_worker("chat worker", speed=4.0)
    horde.queue(max_tokens=512)
    horde.take_nothing()
    horde.queue(max_tokens=480)
    assert horde.take()["payload"]["max_length"] == 480


# FR-02


@pytest.mark.parametrize(
    ("limit", "sent", "before", "after"),
    [(512, {"max_tokens": 700}, 700, 512), (256, {}, 512, 256)],
)
def test_output_above_every_workers_limit_is_lowered(
    horde: ChatHorde, limit: int, sent: dict[str, int], before: int, after: int
) -> None:
    limits = {"max_context_length": 8192, "max_length": limit}
    horde.take_nothing(chat_limits=limits)
    price = horde.submit(max_tokens=after, horde={"dry_run": True}).json["kudos"]
    quoted = horde.submit(**sent, horde={"dry_run": True}).json
    assert (quoted["kudos"], quoted["resolved"]["params"]["max_length"]) == (price, after)
    accepted = horde.submit(**sent)
    assert (accepted.status_code, accepted.json["kudos"]) == (202, price)
    adjustments = horde.status(accepted.json["id"])["context_adjustments"]
    assert adjustments[0] == {"from": before, "to": after, "reason": "worker_max_length"}
    assert horde.take(chat_limits=limits)["payload"]["max_length"] == after


# FR-05


def test_contradictory_and_placeholder_targets(horde: ChatHorde) -> None:
    horde.take_nothing(name="elsewhere", model="another/model")
    elsewhere = horde.get("/workers/name/elsewhere").json["id"]
    accepted = horde.submit(horde={"only": [elsewhere]})
    assert accepted.status_code == 202
    assert accepted.json["message"].startswith("Warning: No available workers")
    status = horde.status(accepted.json["id"])
    assert (status["is_possible"], status["impossible_reason"]) == (False, None)
    answer = horde.submit(horde={"operation_key": "string"})
    assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")
    answer = horde.submit(horde={"only": ["string"]})
    assert (answer.status_code, "string" in answer.json["message"]) == (404, True)
    before = count_requests()
    for options in ({}, {"dry_run": True}):
        for content in ("hi", "word " * 50_000):
            answer = horde.submit(
                model=KNOWN_MODEL, messages=[{"role": "user", "content": content}], horde=options
            )
            assert (answer.status_code, answer.json["rc"]) == (403, "NoEligibleWorker")
            assert f"'{KNOWN_MODEL}'" in answer.json["message"]
            answer = horde.submit(
                model="nobody's", messages=[{"role": "user", "content": content}], horde=options
            )
            assert (answer.status_code, answer.json["rc"]) == (404, "UnknownChatModel")
    assert count_requests() == before


# FR-07


def test_zero_is_not_failure(horde: ChatHorde) -> None:
    request_id = horde.queue()
    answer = horde.fault(horde.take()["id"])
    assert (answer.status_code, answer.json) == (200, {"reward": 0})
    answer = horde.reply(
        horde.take()["id"], "", reasoning_tokens=0, prompt_tokens=0, completion_tokens=0
    )
    assert (answer.status_code, answer.json["reward"] > 0) == (200, True)
    [shown] = horde.status(request_id)["generations"]
    assert (
        shown["text"],
        shown["message"]["content"],
        shown["prompt_tokens"],
        shown["reasoning_tokens"],
    ) == ("", "", 0, 0)


# FR-08


def test_server_trouble_does_not_punish_workers(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is away for a real connection: what the clients of the process reach refuses them."""
    held = horde.queue(stream=True)
    streamed = horde.take()
    doomed = horde.queue()
    horde.cancel(doomed)
    requests = [horde.queue(stream=True), horde.queue()]
    away = {
        database: redis_ctrl.build_client("redis://127.0.0.1:1", database)
        for database in redis_ctrl._PURPOSES
    }
    with monkeypatch.context() as trouble:
        trouble.setattr(redis_ctrl.state.get(), "clients", away)
        trouble.setattr(
            redis_ctrl.state.get(), "breaker", CircuitBreaker(redis_ctrl.RETRY_AFTER_SECONDS)
        )
        job = horde.take()
        posts = [
            horde.post_progress(job_id) for job_id in (streamed["id"], job["id"]) for _ in range(10)
        ]
        assert {(post.status_code, post.json["rc"]) for post in posts} == {
            (503, "ChatProgressUnavailable")
        }
        assert horde.reply(job["id"]).json["reward"] > 0
        assert horde.reply(streamed["id"]).json["reward"] > 0
        assert horde.cancel(requests[1]).status_code == 200
    assert [read_status(horde, request_id) for request_id in (held, requests[0])] == [(0, 0, 1)] * 2
    assert require_worker("chat worker").uncompleted_jobs == 0
    assert list_discrepancies() == ()


# FR-09


def test_shared_keys_around_zero(horde: ChatHorde) -> None:
    with transaction() as session:
        shared = [UserSharedKey(user_id=horde.requester_id, kudos=kudos) for kudos in (1, 0, -1)]
        session.add_all(shared)
        session.flush()
        poor, empty, unlimited = (str(key.id) for key in shared)
    answer = horde.submit(key=poor, max_tokens=4096)
    assert (answer.status_code, answer.json["rc"]) == (403, "SharedKeyInsufficientKudos")
    answer = horde.submit(key=poor, max_tokens=4096, seed=1)
    assert (answer.status_code, answer.json["rc"]) == (403, "NoEligibleWorker")
    assert count_requests() == 0
    assert horde.submit(key=empty).json["rc"] == "SharedKeyEmpty"
    assert horde.submit(key=unlimited, max_tokens=1024).status_code == 202
    with transaction() as session:
        assert session.get_one(UserSharedKey, UUID(unlimited)).kudos == -1


# FR-10

ODD = "aphrodite/Org/Model-13b:Q4 K é"


def test_a_model_id_is_kept_byte_for_byte(horde: ChatHorde) -> None:
    horde.take_nothing(name="odd", model=ODD)
    request_id = horde.queue(model=ODD)
    job = horde.take(name="odd", model=ODD)
    assert job["model"] == ODD
    answer = horde.reply(job["id"], model=ODD.upper())
    assert (answer.json["rc"], f"'{ODD}'" in answer.json["message"]) == ("ChatModelMismatch", True)
    assert horde.reply(job["id"], model=ODD).status_code == 200
    assert horde.status(request_id)["generations"][0]["model"] == ODD
    clear_all()
    names = [entry["name"] for entry in horde.get("/status/models?type=text&chat=true").json]
    assert ODD in names
    [entry] = horde.get(f"/status/models/{quote(ODD, safe='')}").json
    assert entry["name"] == ODD
    answer = horde.get("/status/models/nobody%2Fs")
    assert (answer.status_code, answer.json["rc"]) == (404, "ModelNotFound")
    for other in (ODD.lower(), f"{ODD} ", ODD.upper()):
        assert horde.submit(model=other).json["rc"] == "UnknownChatModel"


# FR-11


def test_kudos_match_the_work(horde: ChatHorde) -> None:
    def earn(
        request: dict[str, Any], *reply: Any, features: list[str] | None = None, **changes: Any
    ) -> tuple[float, Any]:
        declared = {"chat_features": ["prompt_overflow_refused", *(features or [])]}
        horde.take_nothing(**declared)
        request_id = horde.queue(**request)
        answer = horde.reply(horde.take(**declared)["id"], *reply, **changes)
        assert answer.status_code == 200, answer.json
        return float(answer.json["reward"]), horde.status(request_id)["generations"][0]

    honest, _ = earn({}, "x" * 200)
    boastful, shown = earn({}, "x" * 200, completion_tokens=10_000_000)
    assert (boastful, shown["completion_tokens"]) == (honest, 10_000_000)
    short, _ = earn({"max_tokens": 512}, "Blue.")
    assert short < horde.submit(max_tokens=512, horde={"dry_run": True}).json["kudos"] / 2
    tools = {"tools": [build_tool()], "max_tokens": 64}
    long_call = {"tool_calls": [build_call(arguments="x" * 4000)], "finish_reason": "tool_calls"}
    capped, shown = earn(tools, None, features=["tools"], **long_call)
    exact, _ = earn(tools, "x" * 256, features=["tools"])
    assert (capped, shown["charge_basis"]) == (exact, "output_estimate")


# FR-17


def test_null_is_the_same_as_absent(horde: ChatHorde) -> None:
    optional = (
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "presence_penalty",
        "frequency_penalty",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "metadata",
        "user",
        "models",
        "horde",
    )
    body = {"model": MODEL, "messages": [USER | {"name": None}]} | dict.fromkeys(optional)
    answer = horde.submit(body)
    assert answer.status_code == 202, answer.json
    with_nulls = horde.take()["payload"]
    horde.queue(messages=[USER])
    assert with_nulls == horde.take()["payload"]
    assert (with_nulls["max_length"], with_nulls["temperature"], with_nulls["top_p"]) == (
        512,
        1.0,
        1.0,
    )
    options = (
        "only",
        "ignore",
        "max_context_length",
        "context_fit",
        "conformance",
        "max_kudos",
        "dry_run",
        "operation_key",
    )
    assert horde.submit(horde=dict.fromkeys(options)).status_code == 202
    for refused in ("logprobs", "functions"):
        answer = horde.submit(build_chat_body() | {refused: None})
        assert answer.json["rc"] == "UnsupportedChatParameter"
    for required in ({"messages": None}, {"model": None}):
        answer = horde.submit(build_chat_body() | required)
        assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")


# FR-18


def test_the_developer_role(horde: ChatHorde) -> None:
    key = {"operation_key": str(uuid4())}
    developer = [{"role": "developer", "content": "Be brief."}, USER]
    request_id = horde.queue(messages=developer, horde=key)
    assert horde.take()["payload"]["messages"] == [{"role": "system", "content": "Be brief."}, USER]
    again = horde.submit(messages=[{"role": "system", "content": "Be brief."}, USER], horde=key)
    assert (again.status_code, again.json["id"]) == (200, request_id)
    for role in ("function", "banana"):
        answer = horde.submit(messages=[{"role": role, "content": "x"}, USER])
        assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")
        assert f"messages[0].role={role}" in answer.json["message"]


# FR-19


def test_text_parts_are_kept_and_roles_limit_parts(horde: ChatHorde) -> None:
    parts = [{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}]
    horde.queue(messages=[{"role": "user", "content": parts}])
    assert horde.take()["payload"]["messages"] == [{"role": "user", "content": parts}]
    declared = {"chat_features": ["prompt_overflow_refused", "tools"]}
    horde.take_nothing(**declared)
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [build_call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts},
    ]
    horde.queue(messages=history)
    assert horde.take(**declared)["payload"]["messages"] == history
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused = [
        ([{"role": "system", "content": [image]}, USER], "messages[0].content[0].type=image_url"),
        (
            [USER, {"role": "assistant", "content": [parts[0], image]}],
            "messages[1].content[1].type=image_url",
        ),
        (
            [*history[:2], history[2] | {"content": [image]}],
            "messages[2].content[0].type=image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages[0].content[0].type=input_audio",
        ),
    ]
    for messages, path in refused:
        answer = horde.submit(messages=messages)
        assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")
        assert path in answer.json["message"]
    mebibyte = ["é" * (1024 * 1024 // 100)] * 50
    spread = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in mebibyte[:25]]}
    ] + [{"role": "user", "content": text} for text in mebibyte[25:]]
    rest = 1024 * 1024 - sum(len(text.encode()) for text in mebibyte)
    allowed = horde.submit(messages=[*spread, {"role": "user", "content": "x" * rest}])
    assert allowed.json.get("rc") in (None, "PromptExceedsContext")
    answer = horde.submit(messages=[*spread, {"role": "user", "content": "x" * (rest + 1)}])
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")


# FR-20

ASKED = {"role": "assistant", "content": None, "tool_calls": [build_call()]}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}
TWO_IDS = {"role": "assistant", "content": None, "tool_calls": [build_call(), build_call()]}


def test_a_tool_history_is_carried_untouched(horde: ChatHorde) -> None:
    declared = {"chat_features": ["prompt_overflow_refused", "tools"]}
    horde.take_nothing(**declared)
    without_content = {key: value for key, value in ASKED.items() if key != "content"}
    for asked in (ASKED, without_content):
        horde.queue(messages=[USER, asked, ANSWERED])
        assert horde.take(**declared)["payload"]["messages"] == [USER, ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("messages", "path", "words"),
    [
        ([USER, ASKED], "messages", "did not have response messages: call_1"),
        ([USER, ASKED, USER], "messages[2].role", "must be followed by tool messages"),
        (
            [USER, ASKED, ANSWERED | {"tool_call_id": "call_9"}],
            "messages[2].tool_call_id",
            "'call_9' not found",
        ),
        (
            [USER, ASKED, ANSWERED, ANSWERED],
            "messages[3].role",
            "must be a response to a preceding message",
        ),
        ([USER, TWO_IDS, ANSWERED], "messages[1].tool_calls", "call_1"),
    ],
)
def test_a_broken_tool_history_is_refused(
    horde: ChatHorde, messages: list[Any], path: str, words: str
) -> None:
    answer = horde.submit(messages=messages)
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")
    assert answer.json["message"].startswith(f"{path}: ")
    assert words in answer.json["message"]


# FR-21


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "none"},
        {
            "tool_choice": {"type": "function", "function": {"name": "other"}},
            "tools": [build_tool()],
        },
        {"parallel_tool_calls": False},
    ],
)
def test_an_impossible_tool_choice_is_refused(horde: ChatHorde, changes: dict[str, Any]) -> None:
    answer = horde.submit(**changes)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatRequestConflict")
    assert count_requests() == 0


# FR-29


def test_reasoning_never_becomes_the_answer(horde: ChatHorde) -> None:
    declared = {"chat_features": ["prompt_overflow_refused", "json_object"]}
    horde.take_nothing(**declared)
    request_id = horde.queue(horde={"include_reasoning": False})
    assert (
        horde.reply(
            horde.take(**declared)["id"],
            "",
            reasoning_content="Let me think",
            finish_reason="length",
        ).status_code
        == 200
    )
    [shown] = horde.status(request_id)["generations"]
    assert (shown["text"], shown["message"]["content"], shown["finish_reason"]) == (
        "",
        "",
        "length",
    )
    assert shown["message"]["reasoning_content"] == "Let me think"
    horde.queue(response_format={"type": "json_object"})
    assert (
        horde.reply(
            horde.take(**declared)["id"], "{}", reasoning_content="not JSON at all"
        ).status_code
        == 200
    )


# FR-30

LOOSE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "context"),
    [
        ({"properties": {"shade": LOOSE}, "required": ["shade"]}, "('properties', 'shade')"),
        ({"properties": {"shade": {"type": "string"}}, "required": []}, "()"),
        ({"properties": {}, "$defs": {"inner": LOOSE}}, "('$defs', 'inner')"),
        (
            {"properties": {"a": {"type": "array", "items": LOOSE}}, "required": ["a"]},
            "('properties', 'a', 'items')",
        ),
        (
            {"properties": {"a": {"anyOf": [LOOSE]}}, "required": ["a"]},
            "('properties', 'a', 'anyOf', '0')",
        ),
    ],
)
def test_strict_means_strict(horde: ChatHorde, schema: dict[str, Any], context: str) -> None:
    schema = {"type": "object", **schema, **CLOSED}
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": True, "schema": schema},
    }
    answer = horde.submit(response_format=response_format)
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")
    assert answer.json["message"].startswith(
        f"Invalid schema for response_format 'colour': In context={context}, "
    )
    tool = build_tool("get_weather", strict=True) | {}
    tool["function"]["parameters"] = schema
    answer = horde.submit(tools=[tool])
    assert answer.json["message"].startswith(
        f"Invalid schema for function 'get_weather': In context={context}, "
    )
    assert count_requests() == 0
    response_format["json_schema"]["strict"] = False
    assert horde.submit(response_format=response_format).status_code == 202


def test_the_word_json_is_asked_for_by_guards_alone(horde: ChatHorde) -> None:
    response_format = {"type": "json_object"}
    assert horde.submit(response_format=response_format).status_code == 202
    answer = horde.submit(response_format=response_format, horde={"openai_guards": True})
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatRequestConflict")
    said = [{"role": "user", "content": "Answer in Json."}]
    assert (
        horde.submit(
            messages=said, response_format=response_format, horde={"openai_guards": True}
        ).status_code
        == 202
    )


# FR-32


@pytest.mark.parametrize(
    ("data", "content_type", "statuses"),
    [
        (b"{}", None, {415}),
        (b"{}", "text/plain", {415}),
        (b"", "application/json", {400}),
        (b"[]", "application/json", {400}),
        (b"null", "application/json", {400}),
        (b'"hi"', "application/json", {400}),
        (b'{"model": ', "application/json", {400}),
        (b"[" * 100_000, "application/json", {400}),
        (b'{"a":' * 100_000, "application/json", {400}),
    ],
)
def test_odd_bodies_are_refused_in_json(
    horde: ChatHorde, data: bytes, content_type: str | None, statuses: set[int]
) -> None:
    answer = send_raw(horde, data, content_type)
    assert answer.status_code in statuses
    assert answer.content_type.startswith("application/json")
    assert answer.json["message"]
    assert answer.status_code == 415 or answer.json["rc"] == "BadRequest"


def test_a_wrong_verb_is_told_the_right_ones(horde: ChatHorde) -> None:
    answer = horde.client.put("/api/v2/generate/chat/async", json={})
    assert (answer.status_code, "POST" in answer.headers["Allow"]) == (405, True)
    assert answer.json["message"]


# FR-33


def test_keys_and_conversations_stay_private(
    horde: ChatHorde, caplog: pytest.LogCaptureFixture
) -> None:
    formatter = JsonFormatter()
    marked = [{"role": "user", "content": MARKER}]
    told: list[str] = []
    with caplog.at_level(logging.INFO):
        told.append(horde.submit(messages=marked, max_tokens=5).text)
        told.append(horde.submit(messages=marked, key=f"wrong {MARKER}").text)
        told.append(
            horde.submit(
                messages=[{"role": "user", "content": [{"type": "text", "txt": MARKER}]}]
            ).text
        )
        faulted, expiring = horde.queue(messages=marked), horde.queue(messages=marked)
        for _ in range(3):
            told.append(
                horde.fault(horde.take()["id"], fault_reason=f"disk full on alice-pc {MARKER}").text
            )
        told.append(
            horde.post(
                "/generate/text/submit", {"id": "x", "generation": MARKER}, f"wrong {MARKER}"
            ).text
        )
        told.append(json.dumps(horde.status(faulted)))
        told.append(json.dumps(horde.status(expiring)))
        told.append(horde.cancel(faulted).text)
        with transaction() as session:
            session.execute(update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1)))
        threads.check_waiting_prompts()
        told.append(horde.get(f"/generate/chat/status/{expiring}").text)
    lines = [formatter.format(record) for record in caplog.records]
    for text in (*told, *lines):
        assert MARKER not in text
        assert "alice-pc" not in text
        assert horde.requester_key not in text
        assert horde.owner_key not in text
    get_reader()
    figures = [read_figures(name) for name in metrics.DECLARATIONS]
    assert "alice-pc" not in str(figures)


def test_a_worker_is_told_the_messages_and_the_status_never(horde: ChatHorde) -> None:
    request_id = horde.queue(messages=[{"role": "user", "content": MARKER}])
    assert MARKER in json.dumps(horde.take())
    assert MARKER not in json.dumps(horde.status(request_id))


# FR-42


def test_encodings_and_ambiguous_json(horde: ChatHorde) -> None:
    body = json.dumps(build_chat_body()).encode()
    answer = send_raw(horde, gzip.compress(body), **{"Content-Encoding": "gzip"})
    assert (answer.status_code, "Content-Encoding" in answer.json["message"]) == (415, True)
    answer = send_raw(
        horde, gzip.compress(b" " * (8 * 1024 * 1024)), **{"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 415
    assert send_raw(horde, b"\xef\xbb\xbf" + body).status_code == 202
    for data in (
        body.replace(b"Name", b"\xff\xfe"),
        json.dumps(build_chat_body()).encode("utf-16"),
    ):
        answer = send_raw(horde, data)
        assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")
    twice = body.replace(b"{", b'{"model": "nobody\'s", ', 1)
    assert send_raw(horde, twice).status_code == 202  # the last one is checked and used
    twice = body[:-1] + b', "model": "nobody\'s"}'
    assert send_raw(horde, twice).json["rc"] == "UnknownChatModel"
    for number in (b"NaN", b"Infinity", b"1e999"):
        answer = send_raw(horde, body[:-1] + b', "temperature": ' + number + b"}")
        assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")
    for escaped, rc in (("\\u0000", "NulByteInPayload"), ("\\ud800", "InvalidPromptEncoding")):
        answer = send_raw(horde, body.replace(b"Name", escaped.encode()))
        assert (answer.status_code, answer.json["rc"]) == (400, rc)


# FR-43


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_long_job_is_not_handed_out_twice(horde: ChatHorde, is_trusted: bool) -> None:
    roles = (UserRoleTypes.TRUSTED,) if is_trusted else ()
    _, key = make_user(*roles)
    other = {"key": horde.owner_key, "name": "second worker"}
    horde.take_nothing(**other)
    horde.take_nothing(key=key, name="streaming worker")
    request_id = horde.queue(stream=True)
    job_id = horde.take(key=key, name="streaming worker")["id"]
    for number in range(1, 9):  # every 30 s for 4 minutes
        let_pass(job_id, 30)
        threads.check_waiting_prompts()
        answer = horde.post_progress(job_id, number, "more ", key=key)
        if not is_trusted and number * 30 > 200:
            assert (answer.status_code, answer.json["rc"]) == (404, "ChatJobAborted")
            break
        assert answer.status_code == 200
        horde.take_nothing(**other)
    body = build_chat_submit_body(job_id, "The whole reply.")
    submitted = horde.post("/generate/text/submit", body, key)
    if is_trusted:
        assert submitted.status_code == 200, submitted.json
        assert read_status(horde, request_id) == (0, 0, 1)
        return
    assert number == 7
    assert (submitted.status_code, submitted.json["rc"]) == (400, "AbortedGen")
    assert "200 seconds" in submitted.json["message"]
    assert horde.take(**other)["id"] != job_id  # it is offered again exactly once
    horde.take_nothing(**other)
    horde.take_nothing(key=key, name="streaming worker")


def test_a_repeated_delta_keeps_no_job(horde: ChatHorde) -> None:
    horde.queue(stream=True)
    job_id = horde.take()["id"]
    let_pass(job_id, 20)
    assert horde.post_progress(job_id, 1, "once").json == {"accepted_seq": 1, "cancelled": False}
    for _ in range(4):
        let_pass(job_id, 30)
        threads.check_waiting_prompts()
        assert horde.post_progress(job_id, 1, "once").json == {
            "accepted_seq": 1,
            "cancelled": False,
        }
    let_pass(job_id, 31)  # 151 s after the post that was appended
    threads.check_waiting_prompts()
    answer = horde.post_progress(job_id, 1, "once")
    assert (answer.status_code, answer.json["rc"]) == (404, "ChatJobAborted")
    refused = horde.reply(job_id)
    assert (refused.status_code, refused.json["rc"]) == (400, "AbortedGen")
    lease = re.search(r"within (\d+) seconds", refused.json["message"])
    assert lease is not None
    assert 170 < int(lease[1]) < 200
    assert horde.take()["id"] != job_id
    horde.take_nothing()


# FR-44


def test_a_lost_answer_is_not_paid_twice(horde: ChatHorde) -> None:
    key = {"operation_key": str(uuid4())}
    first = horde.submit(horde=key)
    assert first.status_code == 202
    with transaction() as session:
        session.execute(
            update(WaitingPrompt.metadata.tables["workers"]).values(
                last_check_in=utcnow() - timedelta(hours=1)
            )
        )
    again = horde.submit(horde=key)
    assert (again.status_code, again.json) == (
        200,
        {"id": first.json["id"], "kudos": first.json["kudos"]},
    )
    assert count_requests() == 1
    with transaction() as session:
        consumed = session.scalar(select(WaitingPrompt.consumed_kudos))
    assert consumed == 1


# FR-12, last: the limiter is one for the process, so the other tests would be counted too


def test_everyone_behind_one_address(service_urls: ServiceAddresses) -> None:
    settings: dict[str, Any] = {"rate_limits_enabled": True, "chat_request_2sec_limit": "2/second"}
    with chat_horde(
        service_urls, "one_address", text_request_2sec_limit="2/second", **settings
    ) as horde:
        start_anew()
        horde.take_nothing()
        make_user(UserRoleTypes.SERVICE, proxy_passkey="a passkey of the front")
        client = horde.client

        def send(client: FlaskClient, key: str, path: str = "chat", **headers: str) -> int:
            body: dict[str, Any] = build_chat_body() if path == "chat" else {"prompt": "Once"}
            return client.post(
                f"/api/v2/generate/{path}/async", json=body, headers={"apikey": key, **headers}
            ).status_code

        for number in range(3):
            _, key = make_user()
            proxied = {
                "Proxied-For": f"203.0.113.{number}",
                "Proxy-Authorization": "a passkey of the front",
            }
            assert [send(client, key, **proxied) for _ in range(2)] == [202, 202]
        answers = [
            send(client, horde.requester_key, **{"X-Forwarded-For": f"203.0.113.{n}"})
            for n in range(10)
        ]
        assert 429 in answers
        assert send(client, horde.requester_key, "text") == 202
