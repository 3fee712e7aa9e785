# SPDX-License-Identifier: AGPL-3.0-or-later
"""Popping chat jobs: what a worker declares, who gets what, and what the job carries."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Float, func, literal, select, update

from devtools.services import ServiceAddresses
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import (
    EligibilityInputs,
    RequestNeeds,
    TextWorker,
    get_text_worker_lease_capacity,
)
from horde.clock import utcnow
from horde.database import caches, threads
from horde.database.text_functions import text_wp_speed_gate_clause
from horde.db import transaction
from horde.model_reference import list_text_model_names
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_pop_body,
    build_tool,
    chat_horde,
    start_anew,
)
from tests.integration.instruments import Counting
from tests.integration.rows import find_job_row, find_request, make_request, make_user

KNOWN_MODEL = list_text_model_names()[0]
TOOL_FEATURES = ["tools", "tool_choice_enforced", "prompt_overflow_refused"]
STRICT_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"shade": {"type": "string"}},
            "required": ["shade"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_pop") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def get_named_worker(name: str = "chat worker") -> TextWorker | None:
    with transaction() as session:
        return session.scalar(select(TextWorker).where(TextWorker.name == name))


def require_named_worker(name: str = "chat worker") -> TextWorker:
    worker = get_named_worker(name)
    assert worker is not None
    return worker


def set_worker(name: str = "chat worker", **columns: Any) -> None:
    with transaction() as session:
        session.execute(update(Worker).where(Worker.name == name).values(**columns))


def make_old(horde: ChatHorde) -> None:
    """A worker past its first 30 seconds, whose next pop is inside the window of its last
    check-in.
    """
    horde.take_nothing()
    set_worker(created=utcnow() - timedelta(hours=1), last_check_in=utcnow() - timedelta(seconds=1))


def get_declaration(worker: TextWorker) -> tuple[Any, ...]:
    return (
        worker.accepts_chat_jobs,
        worker.accepts_prompt_jobs,
        worker.chat_features,
        worker.chat_max_context_length,
        worker.chat_max_length,
        worker.chat_model_id,
        worker.chat_tools_max_temperature,
        worker.image_transports,
    )


# --- the declaration
# ------------------------------------------------------------------------------------------------


def test_a_declaration_is_stored_with_the_names_that_are_known(horde: ChatHorde) -> None:
    horde.take_nothing(
        prompt_jobs=False,
        chat_features=["vision", "seed", "telepathy", "single_tool_call_enforced", "seed"],
        chat_limits={"max_context_length": 9000, "max_length": 700, "tools_max_temperature": 0.5},
        image_transports=["messages_url", "carrier_pigeon", "base64"],
    )
    features = ["seed", "single_tool_call_enforced", "vision"]
    expected = (True, False, features, 9000, 700, MODEL, 0.5, ["base64", "messages_url"])
    assert get_declaration(require_named_worker()) == expected


def test_a_declaration_is_stored_inside_the_window_where_the_rest_is_not(horde: ChatHorde) -> None:
    make_old(horde)
    horde.take_nothing(
        chat_features=["seed"],
        chat_limits={"max_context_length": 100, "max_length": 50},
        max_length=99,
    )
    worker = require_named_worker()
    assert (worker.chat_features, worker.chat_max_context_length, worker.chat_max_length) == (
        ["seed"],
        100,
        50,
    )
    assert worker.max_length == 512


def test_a_pop_without_chat_jobs_withdraws_everything_at_once(horde: ChatHorde) -> None:
    make_old(horde)
    horde.queue()
    answer = horde.pop(chat_jobs=None)
    assert (answer.status_code, answer.json["id"]) == (200, None)
    assert get_declaration(require_named_worker()) == (
        False,
        True,
        None,
        None,
        None,
        None,
        None,
        None,
    )


def test_a_new_model_inside_the_window_counts_at_once(horde: ChatHorde) -> None:
    make_old(horde)
    horde.take_nothing(model="another/model")
    request_id = horde.queue(model="another/model")
    assert horde.status(request_id)["is_possible"]
    assert horde.take(model="another/model")["model"] == "another/model"


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_limits": None},
        {"model_id": None},
        {"model_id": "another/model"},
        {"prompt_jobs": False, "chat_jobs": None},
        {
            "chat_limits": {
                "max_context_length": 100,
                "max_length": 50,
                "tools_max_temperature": -0.1,
            }
        },
        {"chat_limits": {"max_context_length": 0, "max_length": 50}},
        {"chat_limits": {"max_context_length": 100}},
        {"chat_limits": {"max_context_length": "100", "max_length": 50}},
        {"chat_limits": [100, 50]},
        {"chat_features": "seed"},
        {"chat_features": [1]},
        {"image_transports": {"url": True}},
        {"model_id": 5},
        {"chat_jobs": "yes"},
    ],
)
def test_an_invalid_declaration_is_refused_and_leaves_nothing(
    horde: ChatHorde, changes: dict[str, Any]
) -> None:
    horde.take_nothing(name="another worker")
    horde.queue()
    answer = horde.pop(**changes)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatDeclarationInvalid")
    assert get_named_worker() is None
    horde.take_nothing(name="chat worker", model="another/model")
    before = get_declaration(require_named_worker())
    assert horde.pop(**changes).status_code == 400
    assert get_declaration(require_named_worker()) == before


def test_an_owner_is_checked_before_the_declaration(horde: ChatHorde) -> None:
    horde.take_nothing()
    _, key = make_user()
    answer = horde.pop(key=key, model_id="another/model")
    assert (answer.status_code, answer.json["rc"]) == (403, "WrongCredentials")


def test_chat_fields_without_chat_jobs_are_not_read(horde: ChatHorde) -> None:
    answer = horde.pop(chat_jobs=False, chat_limits="none", model_id=7)
    assert answer.status_code == 200


# --- the job
# --------------------------------------------------------------------------------------------------


def test_a_job_carries_every_sampling_key(horde: ChatHorde) -> None:
    horde.take_nothing(
        chat_features=[
            "prompt_overflow_refused",
            "presence_penalty",
            "frequency_penalty",
            "reasoning_effort",
        ]
    )
    horde.queue(
        temperature=1.5,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        reasoning_effort="none",
        max_tokens=40,
    )
    job = horde.take(
        chat_features=[
            "prompt_overflow_refused",
            "presence_penalty",
            "frequency_penalty",
            "reasoning_effort",
        ]
    )
    assert job["payload"] == {
        "messages": [{"role": "user", "content": "Name one colour."}],
        "temperature": 1.5,
        "top_p": 0.5,
        "frequency_penalty": -1,
        "presence_penalty": 1,
        "rep_pen": 1.0,
        "top_k": 0,
        "min_p": 0,
        "reasoning_effort": "none",
        "max_length": 40,
        "max_context_length": 2048,
        "n": 1,
    }
    assert (job["chat"], job["ttl"], job["model"], len(job["ids"])) == (True, 150, MODEL, 1)


def test_a_text_job_of_a_chat_worker_has_no_chat_key(horde: ChatHorde) -> None:
    horde.take_nothing()
    answer = horde.post(
        "/generate/text/async", {"prompt": "Once", "models": [MODEL]}, horde.requester_key
    )
    assert answer.status_code == 202
    job = horde.take()
    assert "chat" not in job
    assert job["payload"]["prompt"] == "Once"


def test_a_chat_only_worker_gets_no_text(horde: ChatHorde) -> None:
    horde.take_nothing(prompt_jobs=False)
    horde.post("/generate/text/async", {"prompt": "Once", "models": [MODEL]}, horde.requester_key)
    horde.take_nothing(prompt_jobs=False)
    horde.queue()
    assert horde.take(prompt_jobs=False)["chat"]


def test_tools_are_narrowed_for_the_worker_and_stored_whole(horde: ChatHorde) -> None:
    tools = [build_tool("one"), build_tool("two", description="Second.")]
    choice = {"type": "function", "function": {"name": "two"}}
    horde.take_nothing(chat_features=TOOL_FEATURES)
    forced, none, auto = (
        horde.queue(tools=tools, tool_choice=choice),
        horde.queue(tools=tools, tool_choice="none", parallel_tool_calls=False),
        horde.queue(tools=tools),
    )
    payloads = [horde.take(chat_features=TOOL_FEATURES)["payload"] for _ in range(3)]
    assert (payloads[0]["tools"], payloads[0]["tool_choice"]) == ([tools[1]], "required")
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(payloads[1])
    assert (payloads[2]["tools"], "tool_choice" in payloads[2]) == (tools, False)
    with transaction() as session:
        for request_id, expected in ((forced, choice), (none, "none"), (auto, None)):
            request = find_request(UUID(request_id))
            assert request is not None
            session.add(request)
            assert request.chat_extras is not None
            assert request.chat_extras.get("tool_choice") == expected
            assert request.chat_extras["tools"] == tools


def test_a_job_remembers_the_declaration_it_was_assigned_under(horde: ChatHorde) -> None:
    _, job = horde.serve()
    horde.take_nothing(
        model="another/model", chat_limits={"max_context_length": 50, "max_length": 20}
    )
    row = find_job_row(UUID(job["id"]))
    assert row is not None
    assert (row.assigned_model, row.assigned_max_context_length, row.assigned_max_length) == (
        MODEL,
        8192,
        1024,
    )
    assert row.image_transport is None
    assert horde.reply(job["id"]).status_code == 200


def test_one_job_a_chat_pop_whatever_the_amount(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.queue()
    horde.queue()
    assert len(horde.take(amount=5)["ids"]) == 1


def test_the_model_of_a_list_is_the_one_that_serves(horde: ChatHorde) -> None:
    horde.take_nothing(models=[MODEL, KNOWN_MODEL])
    request_id = horde.queue(model=None, models=[KNOWN_MODEL, MODEL])
    job = horde.take(models=[KNOWN_MODEL, MODEL])
    assert job["model"] == MODEL
    assert horde.reply(job["id"]).status_code == 200
    assert horde.status(request_id)["generations"][0]["model"] == MODEL


# --- who gets what
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_changes", "needed"),
    [
        ({"seed": 0}, "seed"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"tools": [build_tool()]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": STRICT_SCHEMA}, "json_schema"),
    ],
)
def test_a_worker_without_the_feature_gets_nothing(
    horde: ChatHorde, request_changes: dict[str, Any], needed: str
) -> None:
    others = ["prompt_overflow_refused", "structured_output_enforced"]
    horde.take_nothing(chat_features=others)
    request_id = horde.queue(**request_changes)
    horde.take_nothing(chat_features=others)
    reason = horde.status(request_id)["impossible_reason"]
    assert reason == {
        "kind": "declaration_gap",
        "missing_declarations": [needed],
        "exceeded_limits": [],
    }
    horde.take(chat_features=[*others, needed])


@pytest.mark.parametrize(
    ("request_changes", "guarantee"),
    [
        ({}, "prompt_overflow_refused"),
        ({"tools": [build_tool()], "tool_choice": "required"}, "tool_choice_enforced"),
        (
            {
                "tools": [build_tool()],
                "tool_choice": {"type": "function", "function": {"name": "lookup_weather"}},
            },
            "tool_choice_enforced",
        ),
        ({"response_format": STRICT_SCHEMA}, "structured_output_enforced"),
    ],
)
def test_a_guarantee_is_needed_under_strict_alone(
    horde: ChatHorde, request_changes: dict[str, Any], guarantee: str
) -> None:
    everything = {
        "tools",
        "json_schema",
        "prompt_overflow_refused",
        "tool_choice_enforced",
        "structured_output_enforced",
    }
    features = sorted(everything - {guarantee})
    horde.take_nothing(chat_features=features)
    strict = horde.queue(**request_changes)
    horde.take_nothing(chat_features=features)
    assert horde.status(strict)["impossible_reason"]["missing_declarations"] == [guarantee]
    horde.queue(**request_changes, horde={"conformance": "best_effort"})
    horde.take(chat_features=features)
    horde.take(chat_features=sorted(everything))


def test_tools_with_a_format_need_a_feature_of_their_own(horde: ChatHorde) -> None:
    features = ["tools", "json_object", "prompt_overflow_refused"]
    horde.take_nothing(chat_features=features)
    horde.queue(tools=[build_tool()], response_format={"type": "json_object"})
    horde.queue(tools=[build_tool()], response_format={"type": "json_object"}, tool_choice="none")
    job = horde.take(chat_features=features)
    assert "tools" not in job["payload"]
    horde.take_nothing(chat_features=features)
    horde.take(chat_features=[*features, "tools_with_response_format"])


def test_the_chat_limits_bind_chat_and_the_text_limits_text(horde: ChatHorde) -> None:
    limits = {"max_context_length": 4096, "max_length": 600}
    horde.take_nothing(chat_limits=limits, max_length=100, max_context_length=1024)
    horde.queue(max_tokens=600)
    horde.take(chat_limits=limits, max_length=100, max_context_length=1024)
    horde.queue(max_tokens=600)
    smaller = {"max_context_length": 4096, "max_length": 599}
    horde.take_nothing(chat_limits=smaller)
    narrower = {"max_context_length": 2047, "max_length": 600}
    horde.take_nothing(chat_limits=narrower)
    horde.take(chat_limits=limits)


def test_the_tool_temperature_is_a_limit_under_both_modes(horde: ChatHorde) -> None:
    features = ["tools", "prompt_overflow_refused"]
    limits = {"max_context_length": 8192, "max_length": 1024, "tools_max_temperature": 0.7}
    horde.take_nothing(chat_features=features, chat_limits=limits)
    request_id = horde.queue(
        tools=[build_tool()], temperature=0.71, horde={"conformance": "best_effort"}
    )
    horde.take_nothing(chat_features=features, chat_limits=limits)
    gap = {
        "kind": "declaration_gap",
        "missing_declarations": [],
        "exceeded_limits": ["tools_max_temperature"],
    }
    assert horde.status(request_id)["impossible_reason"] == gap
    horde.queue(tools=[build_tool()], temperature=0.7)
    horde.queue(temperature=2)
    for _ in range(2):
        horde.take(chat_features=features, chat_limits=limits)
    horde.take(chat_features=features)


def test_another_model_gets_nothing(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.queue()
    horde.take_nothing(name="another worker", model=MODEL.lower())
    horde.take_nothing(
        name="third worker", models=[MODEL, "another/model"], model_id="another/model"
    )
    horde.take()


def test_worker_lists_and_trust_hold(horde: ChatHorde) -> None:
    horde.take_nothing()
    worker_id = str(require_named_worker().id)
    horde.queue(horde={"ignore": [worker_id]})
    horde.take_nothing()
    horde.queue(horde={"only": [worker_id]})
    _, key = make_user()
    other = {"key": key, "name": "another worker"}
    assert horde.take(**other)["chat"]  # the one that ignores the first worker
    horde.take_nothing(**other)
    horde.take()
    horde.queue(horde={"trusted_workers": True})
    horde.take_nothing(**other)
    horde.take()
    horde.queue(horde={"validated_backends": True})
    horde.take_nothing(bridge_agent="unknown:1:here", name="third worker")
    horde.take()


def test_a_worker_in_maintenance_serves_its_owner_alone(horde: ChatHorde) -> None:
    horde.take_nothing()
    set_worker(maintenance=True, maintenance_msg="Away.")
    horde.queue()
    answer = horde.pop()
    assert (answer.status_code, answer.json["rc"]) == (403, "WorkerMaintenance")
    horde.queue(key=horde.owner_key)
    assert horde.take()["chat"]


# --- speed
# --------------------------------------------------------------------------------------------------


def test_a_worker_too_slow_for_the_lease_gets_nothing(horde: ChatHorde) -> None:
    horde.take_nothing()
    set_worker(speed=4.0)
    request_id = horde.queue(max_tokens=512)
    counting = Counting("horde.pop.lease_capacity_limited")
    horde.take_nothing()
    assert counting.read() == [({"horde.gentype": "text"}, 1)]
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"], status["eligible_workers"]) == (
        False,
        None,
        0,
    )
    horde.queue(max_tokens=480)
    assert horde.take()["payload"]["max_length"] == 480


def test_an_unmeasured_worker_is_offered_1200_tokens(horde: ChatHorde) -> None:
    limits = {"max_context_length": 8192, "max_length": 2000}
    counting = Counting("horde.pop.lease_capacity_limited")
    horde.take_nothing(chat_limits=limits)
    assert counting.read() == []
    horde.queue(max_tokens=1201)
    horde.take_nothing(chat_limits=limits)
    horde.queue(max_tokens=1200)
    assert horde.take(chat_limits=limits)["payload"]["max_length"] == 1200


def test_a_text_job_over_capacity_is_offered_and_watched(horde: ChatHorde) -> None:
    counters = {
        name: Counting(f"horde.text.gate_shadow.{name}")
        for name in ("assignments", "outcomes", "service_seconds")
    }
    horde.take_nothing(max_length=1000)
    set_worker(speed=4.0)
    for _ in range(2):
        horde.post(
            "/generate/text/async",
            {"prompt": "Once", "models": [MODEL], "params": {"max_length": 500}},
            horde.requester_key,
        )
    first, second = horde.take(max_length=1000), horde.take(max_length=1000)
    row = find_job_row(UUID(first["id"]))
    assert row is not None
    assert row.over_capacity_at_assignment
    attributes = {"horde.worker_trusted": True, "horde.size_bucket": "<=512"}
    assert counters["assignments"].read() == [(attributes, 2)]
    assert (
        horde.post(
            "/generate/text/submit", {"id": first["id"], "generation": "upon"}, horde.owner_key
        ).status_code
        == 200
    )
    faulted = {"id": second["id"], "generation": "", "state": "faulted"}
    assert horde.post("/generate/text/submit", faulted, horde.owner_key).status_code == 200
    outcomes = {moved["horde.outcome"]: count for moved, count in counters["outcomes"].read()}
    assert outcomes == {"completed": 1, "faulted": 1}
    assert counters["service_seconds"].read() == [(attributes, 1)]


def test_a_chat_job_is_never_over_capacity(horde: ChatHorde) -> None:
    _, job = horde.serve()
    row = find_job_row(UUID(job["id"]))
    assert row is not None
    assert not row.over_capacity_at_assignment


def test_a_wait_is_recorded_at_the_pop(horde: ChatHorde) -> None:
    counting = Counting("horde.text.queue_wait_seconds")
    horde.serve(max_tokens=600)
    assert counting.read() == [
        (
            {
                "horde.requester": "registered",
                "horde.chat": True,
                "horde.requested_bucket": "513-1024",
            },
            1,
        )
    ]


def test_no_worker_row_is_made_by_a_body_that_is_no_pop(horde: ChatHorde) -> None:
    answer = horde.post("/generate/text/pop", build_pop_body(models=[]), horde.owner_key)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatDeclarationInvalid")
    with transaction() as session:
        assert session.scalar(select(func.count()).select_from(Worker)) == 0


@pytest.mark.parametrize("speed", [0.1, 1.0, 3.99, 4.0, 8.53, 10.0, 50.0])
def test_the_speed_gate_of_the_queue_is_that_of_the_rules(horde: ChatHorde, speed: float) -> None:
    lengths = (16, 480, 481, 1023, 1024, 1200, 1201, 6000, 6001)
    ids = {
        make_request(
            horde.requester_id, (MODEL,), is_chat=is_chat, messages=[], max_length=length
        ): (is_chat, length)
        for length in lengths
        for is_chat in (True, False)
    }
    gate = text_wp_speed_gate_clause(
        TextWaitingPrompt, literal(get_text_worker_lease_capacity(speed), Float)
    )
    with transaction() as session:
        offered = set(session.scalars(select(TextWaitingPrompt.id).where(gate)))
    worker = TextWorker(
        id=uuid4(),
        user_id=horde.owner_id,
        speed=speed,
        paused=False,
        maintenance=False,
        last_check_in=utcnow(),
        accepts_chat_jobs=True,
        accepts_prompt_jobs=True,
        chat_model_id=MODEL,
        chat_max_length=16384,
        chat_max_context_length=16384,
        max_length=16384,
        max_context_length=16384,
    )
    inputs = EligibilityInputs(
        models=frozenset({MODEL}),
        owner_trusted=True,
        validated_backends=(),
        minimum_speed=0,
        now=utcnow(),
    )
    for request_id, (is_chat, length) in ids.items():
        facts = RequestNeeds(
            user_id=1, is_chat=is_chat, models=(MODEL,), max_length=length, max_context_length=2048
        )
        assert (request_id in offered) == (
            worker.can_generate_with_eligibility_inputs(facts, inputs) is None
        )


def test_an_aborted_job_over_capacity_is_counted(horde: ChatHorde) -> None:
    horde.take_nothing(max_length=1000)
    set_worker(speed=4.0)
    horde.post(
        "/generate/text/async",
        {"prompt": "Once", "models": [MODEL], "params": {"max_length": 600}},
        horde.requester_key,
    )
    horde.take(max_length=1000)
    with transaction() as session:
        session.execute(
            update(TextProcessingGeneration).values(start_time=utcnow() - timedelta(minutes=5))
        )
    outcomes, aborts = (
        Counting("horde.text.gate_shadow.outcomes"),
        Counting("horde.text.stale_aborts"),
    )
    threads.check_waiting_prompts()
    attributes = {
        "horde.worker_trusted": True,
        "horde.size_bucket": "513-1024",
        "horde.outcome": "aborted",
    }
    assert outcomes.read() == [(attributes, 1)]
    assert aborts.read() == [({"horde.worker_trusted": True, "horde.chat": False}, 1)]


def test_an_assignment_over_capacity_is_logged_by_its_ids(
    horde: ChatHorde, caplog: pytest.LogCaptureFixture
) -> None:
    horde.take_nothing(max_length=1000)
    set_worker(speed=4.0)
    answer = horde.post(
        "/generate/text/async",
        {"prompt": "Once", "models": [MODEL], "params": {"max_length": 600}},
        horde.requester_key,
    )
    with caplog.at_level(logging.INFO):
        job = horde.take(max_length=1000)
    [record] = [
        record.__dict__ for record in caplog.records if record.message == "horde.pop.over_capacity"
    ]
    assert (record["job"], record["request"], record["worker"]) == (
        job["id"],
        answer.json["id"],
        str(require_named_worker().id),
    )
    assert (record["max_length"], record["capacity"], record["speed"]) == (600, 480.0, 4.0)


def test_a_new_model_inside_the_window_is_listed_at_once(horde: ChatHorde) -> None:
    make_old(horde)
    horde.take_nothing(model="another/model")
    caches.clear_all()
    [entry] = horde.get("/status/models?type=text&chat=true").json
    assert (entry["name"], entry["chat"]["workers"]) == ("another/model", 1)
