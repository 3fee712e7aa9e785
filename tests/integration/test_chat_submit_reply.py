# SPDX-License-Identifier: AGPL-3.0-or-later
"""Submitting a chat job: the shape, the verification under both modes, what a refusal leaves,
faults and the price.
"""

import logging
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, text, update

from devtools.services import ServiceAddresses
from horde.actions import chat_refusals
from horde.classes.base.kudos import KudosPosting
from horde.classes.base.worker import WorkerPerformance
from horde.classes.kobold.chat_request import CHAT_WORKER_FAULT_MESSAGES
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.database import threads
from horde.db import transaction
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_call,
    build_chat_submit_body,
    build_tool,
    chat_horde,
    start_anew,
)
from tests.integration.instruments import Counting
from tests.integration.rows import find_job_row, find_request, get_worker, make_user

EVERYTHING = [
    "json_object",
    "json_schema",
    "prompt_overflow_refused",
    "single_tool_call_enforced",
    "structured_output_enforced",
    "tool_choice_enforced",
    "tools",
    "tools_with_response_format",
]
FORCED = {"type": "function", "function": {"name": "lookup_weather"}}
TOOLS = [build_tool(), build_tool("other")]
ENDLESS_SECONDS = 60  # far beyond what a hostile schema may cost
COLOUR = {
    "type": "object",
    "properties": {"shade": {"type": "string"}},
    "required": ["shade"],
    "additionalProperties": False,
}


def schema_format(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": strict, "schema": schema},
    }


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_reply") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def start_job(horde: ChatHorde, /, **request: Any) -> tuple[str, str]:
    """(request, job) of a request served by a worker that declares everything."""
    horde.take_nothing(chat_features=EVERYTHING)
    request_id = horde.queue(**request)
    return request_id, str(horde.take(chat_features=EVERYTHING)["id"])


def require_job_row(job_id: str) -> TextProcessingGeneration:
    job = find_job_row(UUID(job_id))
    assert job is not None
    return job


def is_pending(job_id: str) -> bool:
    job = require_job_row(job_id)
    return job.generation is None and not job.faulted


def get_charges(job_id: str) -> list[Decimal]:
    """What the job's worker earned."""
    with transaction() as session:
        statement = select(KudosPosting.amount).where(
            KudosPosting.event_id == UUID(job_id), KudosPosting.amount > 0
        )
        return list(session.scalars(statement))


# --- the shape
# --------------------------------------------------------------------------------------------------


def test_a_reply_is_stored_whole(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde)
    answer = horde.reply(
        job_id,
        "Blue\x00.",
        reasoning_content="Hm\x00",
        native_finish_reason="eos",
        prompt_tokens=0,
        reasoning_tokens=0,
    )
    assert answer.status_code == 200
    assert type(answer.json["reward"]) is float
    shown = horde.status(request_id)["generations"][0]
    assert shown["message"] == {
        "role": "assistant",
        "content": "Blue\ufffd.",
        "reasoning_content": "Hm\ufffd",
    }
    assert (shown["text"], shown["finish_reason"], shown["native_finish_reason"]) == (
        "Blue\ufffd.",
        "stop",
        "eos",
    )
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["reasoning_tokens"]) == (
        0,
        None,
        0,
    )
    assert (shown["charge_basis"], shown["state"], shown["seed"], shown["gen_metadata"]) == (
        "output_estimate",
        "ok",
        0,
        [],
    )


def test_an_unpaired_surrogate_in_a_reply_is_replaced(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde)
    assert horde.reply(job_id, "a\ud800b").status_code == 200
    assert horde.status(request_id)["generations"][0]["text"] == "a\ufffdb"


def test_what_backends_add_is_left_out(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde, tools=TOOLS)
    call = build_call() | {"index": 0}
    body = build_chat_submit_body(
        job_id, None, tool_calls=[call], finish_reason="tool_calls", extra="ignored"
    )
    body["message"]["refusal"] = None
    assert horde.post("/generate/text/submit", body, horde.owner_key).status_code == 200
    shown = horde.status(request_id)["generations"][0]
    assert shown["message"] == {"role": "assistant", "content": None, "tool_calls": [build_call()]}
    assert (shown["text"], shown["finish_reason"]) == ("", "tool_calls")


MALFORMED: list[dict[str, Any]] = [
    {"message": None},
    {"message": "Blue."},
    {"message": {"role": "user", "content": "Blue."}},
    {"message": {"role": "assistant", "content": None}},
    {"message": {"role": "assistant", "content": 5}},
    {"message": {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]}},
    {"message": {"role": "assistant", "content": "a", "tool_calls": []}},
    {"message": {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}},
    {
        "message": {
            "role": "assistant",
            "content": "a",
            "tool_calls": [build_call(call_id="x" * 257)],
        }
    },
    {
        "message": {
            "role": "assistant",
            "content": "a",
            "tool_calls": [build_call(call_id=str(n)) for n in range(129)],
        }
    },
    {
        "message": {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "x" * (1024 * 1024 + 1),
        }
    },
    {"finish_reason": None},
    {"finish_reason": "eos"},
    {"finish_reason": "tool_calls"},
    {"native_finish_reason": "x" * 33},
    {"prompt_tokens": -1},
    {"completion_tokens": 10_000_001},
    {"reasoning_tokens": "7"},
    {"prompt_tokens": True},
    {"model_id": None},
    {"state": "done"},
    {"generation": "Blue."},
    {"state": "faulted"},  # beside a message
]


@pytest.mark.parametrize("changes", MALFORMED)
def test_a_malformed_reply_is_refused_recorded_and_leaves_the_job(
    horde: ChatHorde, changes: dict[str, Any]
) -> None:
    request_id, job_id = start_job(horde)
    body = {
        key: value
        for key, value in (build_chat_submit_body(job_id) | changes).items()
        if value is not None
    }
    answer = horde.post("/generate/text/submit", body, horde.owner_key)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitInvalid"), answer.json
    assert is_pending(job_id)
    assert require_job_row(job_id).chat_refusal_rc == "ChatSubmitInvalid"
    request = find_request(UUID(request_id))
    assert request is not None
    assert (request.chat_fault_reason, request.chat_fault_rc) == (
        answer.json["message"][:1000],
        "ChatSubmitInvalid",
    )
    assert horde.status(request_id)["fault_reason"] is None
    assert horde.reply(job_id).status_code == 200


def test_a_legacy_reply_to_a_chat_job_is_refused_and_a_legacy_fault_taken(horde: ChatHorde) -> None:
    _, job_id = start_job(horde)
    answer = horde.post(
        "/generate/text/submit", {"id": job_id, "generation": "Blue."}, horde.owner_key
    )
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitInvalid")
    answer = horde.post(
        "/generate/text/submit",
        {"id": job_id, "generation": "", "state": "faulted"},
        horde.owner_key,
    )
    assert (answer.status_code, answer.json) == (200, {"reward": 0})


def test_a_text_job_takes_no_message_and_needs_a_generation(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.post("/generate/text/async", {"prompt": "Once", "models": [MODEL]}, horde.requester_key)
    job_id = horde.take()["id"]
    answer = horde.reply(job_id)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitInvalid")
    answer = horde.post("/generate/text/submit", {"id": job_id}, horde.owner_key)
    assert (answer.status_code, "generation" in answer.json["errors"]) == (400, True)
    assert horde.fault(job_id).json == {"reward": 0}


@pytest.mark.parametrize("job_id", [None, 5, ["a"]])
def test_a_submit_names_its_job(horde: ChatHorde, job_id: object) -> None:
    body = build_chat_submit_body("x") | {"id": job_id}
    answer = horde.post("/generate/text/submit", body, horde.owner_key)
    assert (answer.status_code, answer.json["rc"], list(answer.json["errors"])) == (
        400,
        "BadRequest",
        ["id"],
    )


def test_the_order_of_the_checks(horde: ChatHorde) -> None:
    _, job_id = start_job(horde)
    wrong = build_chat_submit_body(job_id, finish_reason="eos", model="another/model")
    unknown = wrong | {"id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8"}
    answer = horde.post("/generate/text/submit", unknown, "nobody's key")
    assert (answer.status_code, answer.json["rc"]) == (404, "InvalidJobID")
    answer = horde.post("/generate/text/submit", wrong, "nobody's key")
    assert (answer.status_code, answer.json["rc"]) == (401, "InvalidAPIKey")
    _, key = make_user()
    answer = horde.post("/generate/text/submit", wrong, key)
    assert (answer.status_code, answer.json["rc"]) == (403, "WrongCredentials")
    answer = horde.post("/generate/text/submit", wrong, horde.owner_key)
    assert answer.json["rc"] == "ChatSubmitInvalid"
    answer = horde.reply(
        job_id, None, model="another/model", tool_calls=[build_call()], finish_reason="tool_calls"
    )
    assert answer.json["rc"] == "ChatModelMismatch"
    assert require_job_row(job_id).chat_refusal_rc == "ChatModelMismatch"
    assert horde.reply(job_id).status_code == 200
    answer = horde.post("/generate/text/submit", wrong, horde.owner_key)
    assert (answer.status_code, answer.json["rc"]) == (400, "DuplicateGen")
    answer = horde.fault(job_id)
    assert (answer.status_code, answer.json["rc"]) == (400, "DuplicateGen")


def test_a_reply_to_a_faulted_job_is_refused_unchecked_and_unrecorded(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde)
    assert horde.fault(job_id).status_code == 200
    answer = horde.reply(job_id, finish_reason="eos")
    assert (answer.status_code, answer.json["rc"]) == (400, "AbortedGen")
    assert "150" in answer.json["message"]
    request = find_request(UUID(request_id))
    assert request is not None
    assert (request.chat_fault_rc, require_job_row(job_id).chat_refusal_rc) == (None, None)


def test_of_many_submits_at_once_one_is_paid(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde)
    barrier = threading.Barrier(4)
    answers: list[tuple[int, Any]] = []

    def send(number: int) -> None:
        barrier.wait()
        answer = horde.reply(job_id, f"Reply {number}")
        answers.append((answer.status_code, answer.json.get("rc")))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert sorted(answers, key=str) == [(200, None), *[(400, "DuplicateGen")] * 3]
    assert len(horde.status(request_id)["generations"]) == 1


# --- the verification
# -----------------------------------------------------------------------------------------------

CALLS = {"content": None, "tool_calls": [build_call()], "finish_reason": "tool_calls"}
UNKNOWN = {"content": None, "tool_calls": [build_call("unknown")], "finish_reason": "tool_calls"}
SAME_IDS = {
    "content": None,
    "tool_calls": [build_call(), build_call("other")],
    "finish_reason": "tool_calls",
}
OTHER = {"content": None, "tool_calls": [build_call("other")], "finish_reason": "tool_calls"}
WORDS = {"content": "Blue."}
STRICT_ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("none", {"tools": TOOLS, "tool_choice": "none"}, CALLS),
    ("required", {"tools": TOOLS, "tool_choice": "required"}, WORDS),
    ("forced, no call", {"tools": TOOLS, "tool_choice": FORCED}, WORDS),
    ("forced, another", {"tools": TOOLS, "tool_choice": FORCED}, OTHER),
    ("object, prose", {"response_format": {"type": "json_object"}}, WORDS),
    ("object, list", {"response_format": {"type": "json_object"}}, {"content": "[1]"}),
    ("object, NaN", {"response_format": {"type": "json_object"}}, {"content": '{"a": NaN}'}),
    ("object, empty", {"response_format": {"type": "json_object"}}, {"content": ""}),
    (
        "loose schema, list",
        {"response_format": schema_format(COLOUR, strict=False)},
        {"content": "[]"},
    ),
    ("schema, prose", {"response_format": schema_format(COLOUR)}, WORDS),
    ("schema, {}", {"response_format": schema_format(COLOUR)}, {"content": "{}"}),
    ("schema, NaN", {"response_format": schema_format(COLOUR)}, {"content": '{"shade": NaN}'}),
    (
        "schema that does not compile",
        {"response_format": schema_format({"type": "nonsense"})},
        {"content": "{}"},
    ),
    (
        "reference to nothing",
        {"response_format": schema_format({"$ref": "#/$defs/none"})},
        {"content": "{}"},
    ),
    (
        "reference outside",
        {"response_format": schema_format({"$ref": "http://127.0.0.1:1/x"})},
        {"content": "{}"},
    ),
]


@pytest.mark.parametrize(
    ("changes", "reply"), [row[1:] for row in STRICT_ROWS], ids=[row[0] for row in STRICT_ROWS]
)
def test_a_reply_that_breaks_the_contract(
    horde: ChatHorde, changes: dict[str, Any], reply: dict[str, Any]
) -> None:
    _, job_id = start_job(horde, **changes)
    answer = horde.reply(job_id, **reply)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitNonconformant"), answer.json
    assert is_pending(job_id)
    assert require_job_row(job_id).chat_refusal_rc == "ChatSubmitNonconformant"
    _, job_id = start_job(horde, **changes, horde={"conformance": "best_effort"})
    assert horde.reply(job_id, **reply).status_code == 200


@pytest.mark.parametrize("conformance", ["strict", "best_effort"])
@pytest.mark.parametrize(
    ("changes", "reply"),
    [({"tools": TOOLS}, UNKNOWN), ({}, CALLS), ({"tools": TOOLS}, SAME_IDS)],
    ids=["unknown function", "no tools", "shared id"],
)
def test_a_reply_that_cannot_be_one(
    horde: ChatHorde, conformance: str, changes: dict[str, Any], reply: dict[str, Any]
) -> None:
    _, job_id = start_job(horde, **changes, horde={"conformance": conformance})
    answer = horde.reply(job_id, **reply)
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitInvalid")
    assert is_pending(job_id)


@pytest.mark.parametrize(
    ("changes", "reply"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, OTHER),
        ({"tools": TOOLS}, WORDS),
        ({"response_format": {"type": "json_object"}}, {"content": ' {"a": 1} '}),
        ({"response_format": schema_format(COLOUR)}, {"content": '{"shade": "blue"}'}),
        ({"tools": TOOLS, "response_format": schema_format(COLOUR)}, CALLS),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, CALLS | {"content": ""}),
    ],
)
def test_a_reply_that_keeps_it(
    horde: ChatHorde, changes: dict[str, Any], reply: dict[str, Any]
) -> None:
    _, job_id = start_job(horde, **changes)
    assert horde.reply(job_id, **reply).status_code == 200


def test_one_call_is_kept_under_strict_and_all_under_best_effort(
    horde: ChatHorde, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [build_call(), build_call("unknown", "call_2"), build_call(call_id="call_1")]
    request_id, job_id = start_job(horde, tools=TOOLS, parallel_tool_calls=False)
    with caplog.at_level(logging.INFO):
        assert (
            horde.reply(job_id, None, tool_calls=calls, finish_reason="tool_calls").status_code
            == 200
        )
    [record] = [record for record in caplog.records if record.message == "horde.job_submit.done"]
    assert record.__dict__["dropped_tool_calls"] == 2
    shown = horde.status(request_id)["generations"][0]
    assert (shown["message"]["tool_calls"], shown["finish_reason"]) == (
        [build_call()],
        "tool_calls",
    )
    options = {"conformance": "best_effort"}
    request_id, job_id = start_job(horde, tools=TOOLS, parallel_tool_calls=False, horde=options)
    both = [build_call(), build_call("other", "call_2")]
    assert horde.reply(job_id, None, tool_calls=both, finish_reason="tool_calls").status_code == 200
    assert horde.status(request_id)["generations"][0]["message"]["tool_calls"] == both


@pytest.mark.parametrize("conformance", ["strict", "best_effort"])
def test_calls_under_a_forced_function_finish_with_stop(horde: ChatHorde, conformance: str) -> None:
    request_id, job_id = start_job(
        horde, tools=TOOLS, tool_choice=FORCED, horde={"conformance": conformance}
    )
    assert horde.reply(job_id, **CALLS).status_code == 200
    assert horde.status(request_id)["generations"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("state", ["censored", "csam"])
def test_a_withheld_reply_is_held_to_the_rules_of_every_reply_alone(
    horde: ChatHorde, state: str
) -> None:
    request_id, job_id = start_job(horde, response_format=schema_format(COLOUR))
    assert horde.reply(job_id, "Withheld.", state=state).status_code == 200
    assert horde.status(request_id)["generations"][0]["state"] == state
    _, job_id = start_job(horde)
    answer = horde.reply(job_id, **CALLS, state=state)
    assert answer.json["rc"] == "ChatSubmitInvalid"


HOSTILE = {
    "backtracking": ({"type": "string", "pattern": "^(a+)+$"}, '"' + "a" * 40 + '!"'),
    "endless reference": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "{}"),
    "fan out": (
        {
            "$defs": (
                {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 4} for n in range(20)}
                | {"20": {"type": "string"}}
            ),
            "$ref": "#/$defs/0",
        },
        '"a"',
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_seconds_and_stalls_nobody(horde: ChatHorde, name: str) -> None:
    schema, content = HOSTILE[name]
    _, warm = start_job(horde, response_format=schema_format(COLOUR))
    assert horde.reply(warm, '{"shade": "blue"}').status_code == 200  # the helper has started
    request_id, job_id = start_job(horde, response_format=schema_format(schema))
    answers: list[Any] = []
    begun = time.monotonic()
    sender = threading.Thread(target=lambda: answers.append(horde.reply(job_id, content)))
    sender.start()
    time.sleep(0.3)
    with transaction() as session:
        open_transactions = session.scalar(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()"
            )
        )
    assert open_transactions == 0
    assert horde.status(request_id)["processing"] == 1 or answers
    sender.join()
    assert time.monotonic() - begun < ENDLESS_SECONDS
    assert answers[0].json["rc"] == "ChatSubmitNonconformant"
    assert "cannot be compiled" in answers[0].json["message"]


# --- refusals, faults and counters
# ----------------------------------------------------------------------------------


def get_counters(job_id: str) -> tuple[int, int, int]:
    worker = get_worker(require_job_row(job_id).worker_id)
    return worker.nonconformant_replies, worker.aborted_jobs, worker.uncompleted_jobs


def test_a_nonconformant_reply_does_not_count_as_dropped(horde: ChatHorde) -> None:
    _, job_id = start_job(horde, tools=TOOLS, tool_choice="required")
    assert horde.reply(job_id).json["rc"] == "ChatSubmitNonconformant"
    assert horde.fault(job_id, fault_reason="reply_refused").json == {"reward": 0}
    assert get_counters(job_id) == (1, 0, 0)
    details = horde.get("/workers/name/chat%20worker").json
    assert (details["nonconformant_replies"], details["uncompleted_jobs"]) == (1, 0)


def test_a_later_refusal_of_another_kind_takes_the_exemption_away(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde, tools=TOOLS, tool_choice="required")
    assert horde.reply(job_id).json["rc"] == "ChatSubmitNonconformant"
    assert horde.reply(job_id, finish_reason="eos").json["rc"] == "ChatSubmitInvalid"
    assert horde.fault(job_id).status_code == 200
    assert get_counters(job_id) == (0, 1, 1)
    request = find_request(UUID(request_id))
    assert request is not None
    assert request.chat_fault_rc == "ChatSubmitInvalid"


def test_a_reason_does_not_exempt(horde: ChatHorde) -> None:
    _, job_id = start_job(horde)
    assert horde.fault(job_id, fault_reason="tool_violation").status_code == 200
    assert get_counters(job_id) == (0, 1, 1)
    assert horde.fault(job_id).json == {"reward": 0}
    assert get_counters(job_id) == (0, 1, 1)


def test_the_cleanup_keeps_the_exemption(horde: ChatHorde) -> None:
    _, job_id = start_job(horde, tools=TOOLS, tool_choice="required")
    assert horde.reply(job_id).json["rc"] == "ChatSubmitNonconformant"
    with transaction() as session:
        session.execute(
            update(TextProcessingGeneration).values(
                start_time=TextProcessingGeneration.start_time - func.make_interval(0, 0, 0, 0, 1)
            )
        )
    counting = Counting("horde.text.stale_aborts")
    threads.check_waiting_prompts()
    assert get_counters(job_id) == (1, 0, 0)
    assert counting.read() == [({"horde.worker_trusted": True, "horde.chat": True}, 1)]
    answer = horde.reply(job_id)
    assert (answer.json["rc"], "150" in answer.json["message"]) == ("AbortedGen", True)


@pytest.mark.parametrize(
    ("reason", "message"),
    [*CHAT_WORKER_FAULT_MESSAGES.items(), ("disk full on alice-pc", None), (None, None)],
)
def test_a_reason_is_told_once_the_request_is_faulted(
    horde: ChatHorde, reason: str | None, message: str | None
) -> None:
    counting = Counting("horde.chat.worker_faults")
    request_id, job_id = start_job(horde)
    for attempt in range(3):
        assert horde.status(request_id)["fault_reason"] is None
        answer = horde.fault(job_id, fault_reason=None if reason is None else str(reason))
        assert (answer.status_code, answer.json) == (200, {"reward": 0})
        if attempt < 2:
            job_id = horde.take(chat_features=EVERYTHING)["id"]
    horde.take_nothing(chat_features=EVERYTHING)
    status = horde.status(request_id)
    assert (status["faulted"], status["done"], status["generations"], status["restarted"]) == (
        True,
        True,
        [],
        3,
    )
    assert (status["fault_reason"], status["fault_rc"]) == (message, message and "ChatWorkerFault")
    label = "none" if reason is None else str(reason) if message else "unknown"
    assert counting.read() == [({"horde.reason": label, "horde.worker_trusted": True}, 3)]


def test_a_refusal_of_the_same_job_is_more_specific_than_the_worker(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde, tools=TOOLS, tool_choice="required")
    for attempt in range(3):
        refused = horde.reply(job_id)
        assert horde.fault(job_id, fault_reason="reply_refused").status_code == 200
        if attempt < 2:
            job_id = horde.take(chat_features=EVERYTHING)["id"]
    status = horde.status(request_id)
    assert (status["fault_reason"], status["fault_rc"]) == (
        refused.json["message"],
        "ChatSubmitNonconformant",
    )


def test_a_fault_of_a_later_job_overwrites_an_earlier_refusal(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde, tools=TOOLS, tool_choice="required")
    assert horde.reply(job_id).status_code == 400
    for attempt in range(3):
        assert horde.fault(job_id, fault_reason="prompt_overflow").status_code == 200
        if attempt < 2:
            job_id = horde.take(chat_features=EVERYTHING)["id"]
    status = horde.status(request_id)
    assert (status["fault_reason"], status["fault_rc"]) == (
        CHAT_WORKER_FAULT_MESSAGES["prompt_overflow"],
        "ChatWorkerFault",
    )


def test_a_failed_record_does_not_change_the_answer(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        with transaction() as session:
            session.execute(text("SELECT 1 / 0"))

    monkeypatch.setattr(chat_refusals, "record_chat_refusal", fail)
    monkeypatch.setattr(chat_refusals, "record_chat_worker_fault", fail)
    _, job_id = start_job(horde)
    answer = horde.reply(job_id, finish_reason="eos")
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatSubmitInvalid")
    assert horde.fault(job_id, fault_reason="prompt_overflow").json == {"reward": 0}


# --- the price
# --------------------------------------------------------------------------------------------------


def get_reward(horde: ChatHorde, reply: dict[str, Any], /, **request: Any) -> float:
    _, job_id = start_job(horde, **request)
    answer = horde.reply(job_id, **reply)
    assert answer.status_code == 200, answer.json
    return float(answer.json["reward"])


def test_a_reply_is_priced_by_its_characters(horde: ChatHorde) -> None:
    floor = get_reward(horde, {"content": "Blue."})
    assert get_reward(horde, {"content": ""}) == floor
    assert get_reward(horde, {"content": "x" * 80}) == floor
    assert get_reward(horde, {"content": "x" * 160}) == pytest.approx(2 * floor, abs=0.02)
    assert get_reward(horde, {"content": "x" * 80, "reasoning_content": "y" * 80}) == pytest.approx(
        2 * floor, abs=0.02
    )
    # 14 of the name.
    called = {
        "content": None,
        "tool_calls": [build_call(arguments="x" * 146)],
        "finish_reason": "stop",
    }
    assert get_reward(horde, called, tools=TOOLS) == pytest.approx(2 * floor, rel=0.2)


def test_reported_counts_change_nothing(horde: ChatHorde) -> None:
    plain = get_reward(horde, {"content": "x" * 400})
    boastful = {
        "content": "x" * 400,
        "completion_tokens": 10_000_000,
        "prompt_tokens": 0,
        "reasoning_tokens": 10_000_000,
    }
    assert get_reward(horde, boastful) == plain


def test_a_long_reply_is_capped_at_the_requested_length(horde: ChatHorde) -> None:
    capped = get_reward(horde, {"content": "x" * 256}, max_tokens=64)
    assert (
        get_reward(
            horde, {"content": "x" * 40_000, "reasoning_content": "y" * 40_000}, max_tokens=64
        )
        == capped
    )


def test_a_charge_is_shown_with_the_tax(horde: ChatHorde) -> None:
    request_id, job_id = start_job(horde)
    assert horde.status(request_id)["kudos"] == 1
    reward = horde.reply(job_id, "x" * 4000).json["reward"]
    assert horde.status(request_id)["kudos"] == 1 + round(reward + 1)


def test_reasoning_counts_in_the_speed_sample(horde: ChatHorde) -> None:
    _, job_id = start_job(horde, max_tokens=1000)
    with transaction() as session:
        session.execute(
            update(TextProcessingGeneration).values(
                start_time=TextProcessingGeneration.start_time
                - func.make_interval(0, 0, 0, 0, 0, 0, 10)
            )
        )
    assert (
        horde.reply(job_id, "", reasoning_content="y" * 2000, finish_reason="length").status_code
        == 200
    )
    with transaction() as session:
        speed = session.scalars(select(WorkerPerformance.performance)).one()
    assert 35 < speed <= 50


def test_an_empty_reply_is_counted_unless_it_calls(horde: ChatHorde) -> None:
    counting = Counting("horde.text.empty_generations")
    get_reward(horde, CALLS, tools=TOOLS)
    assert counting.read() == []
    get_reward(horde, {"content": ""})
    [(attributes, count)] = counting.read()
    assert (attributes["horde.model"], count) == ("other", 1)


def test_a_hold_is_gone_with_the_last_reply(horde: ChatHorde) -> None:
    _, job_id = start_job(horde, horde={"slow_workers": True})
    assert horde.reply(job_id).status_code == 200
    with transaction() as session:
        assert session.scalar(text("SELECT count(*) FROM kudos_reservations WHERE active")) == 0
