# SPDX-License-Identifier: AGPL-3.0-or-later
"""Queueing a chat request over HTTP: the order of the checks, the bounds, the key, the context, the
kudos.
"""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import delete, func, insert, select
from werkzeug.test import EnvironBuilder, run_wsgi_app

from devtools.services import ServiceAddresses
from horde.actions import queue_chat
from horde.apis.requests import CONFIG_EXTENSION
from horde.chat.flattening import FlattenedChat
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.classes.base.kudos import KudosReservation
from horde.classes.base.stats import Filter, HordeSettings
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes, UserSharedKey
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.clock import utcnow
from horde.database import addresses, caches, text_queue
from horde.db import transaction
from horde.exceptions import TooManyRequests
from horde.model_reference import list_text_model_names
from horde.return_codes import ReturnCode
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_chat_body,
    build_tool,
    chat_horde,
    start_anew,
)
from tests.integration.instruments import Counting
from tests.integration.rows import (
    find_request,
    make_chat_worker,
    make_request,
    make_user,
    make_worker,
)

KNOWN_MODEL = list_text_model_names()[0]
BIG = 1024  # above the free output floor


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_submit") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


@pytest.fixture
def served(horde: ChatHorde) -> ChatHorde:
    """A worker is online that declares no features."""
    horde.take_nothing()
    return horde


def switch(horde: ChatHorde, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    extensions = horde.app.extensions
    monkeypatch.setitem(
        extensions, CONFIG_EXTENSION, replace(extensions[CONFIG_EXTENSION], **settings)
    )


def count_rows() -> tuple[int, int]:
    """Requests and active holds."""
    with transaction() as session:
        requests = session.scalar(select(func.count()).select_from(TextWaitingPrompt)) or 0
        holds = (
            session.scalar(
                select(func.count()).select_from(KudosReservation).where(KudosReservation.active)
            )
            or 0
        )
    return requests, holds


def get_stored(request_id: str) -> TextWaitingPrompt:
    with transaction() as session:
        request = session.get_one(TextWaitingPrompt, UUID(request_id))
        assert request.messages is not None
        session.refresh(request, ["messages", "chat_extras", "submitted_prompt"])
        session.expunge(request)
    return request


def set_maintenance(*, on: bool) -> None:
    with transaction() as session:
        session.merge(HordeSettings(id=1, maintenance=on))


# --- the order of the checks
# ----------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """A body of spaces without an end."""

    read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.read_bytes += len(buffer)
        buffer[:] = b" " * len(buffer)
        return len(buffer)


def send_endless(horde: ChatHorde, **environ: Any) -> tuple[str, dict[str, Any], int]:
    """(status line, answer, bytes read) of a chat submit with a body that never ends."""
    body = Endless()
    built = EnvironBuilder(
        "/api/v2/generate/chat/async", method="POST", content_type="application/json"
    ).get_environ()
    answer, status, _ = run_wsgi_app(horde.app, built | environ | {"wsgi.input": body})
    return status, json.loads(b"".join(answer)), body.read_bytes


def test_a_declared_length_over_the_bound_is_refused_unread(horde: ChatHorde) -> None:
    status, answer, read_bytes = send_endless(horde, CONTENT_LENGTH=str(MAX_CHAT_BODY_BYTES + 1))
    assert (status[:3], answer["rc"], read_bytes) == ("413", "RequestTooLarge", 0)


def test_a_chunked_body_is_read_up_to_the_bound_and_refused(horde: ChatHorde) -> None:
    chunked = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    status, answer, read_bytes = send_endless(horde, **chunked)
    assert (status[:3], answer["rc"]) == ("413", "RequestTooLarge")
    assert read_bytes <= MAX_CHAT_BODY_BYTES + 1


def test_a_body_of_many_megabytes_is_served_its_refusal(served: ChatHorde) -> None:
    answer = served.submit(messages=[{"role": "user", "content": "a" * (20 * 1024 * 1024)}])
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")


def test_the_body_comes_before_the_key(horde: ChatHorde) -> None:
    answer = horde.post("/generate/chat/async", {"model": MODEL, "messages": []})
    assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")
    assert "errors" not in answer.json
    missing = horde.post("/generate/chat/async", build_chat_body())
    assert missing.status_code == 400
    assert "apikey" in missing.json["errors"]


def test_admission_comes_before_maintenance_and_both_before_the_key(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_maintenance(on=True)
    answer = horde.submit(key="nobody's key")
    assert (answer.status_code, answer.json["rc"]) == (400, "MaintenanceMode")
    switch(horde, monkeypatch, chat_admission_enabled=False)
    for options in ({}, {"dry_run": True}):
        answer = horde.submit(key="nobody's key", horde=options)
        assert (answer.status_code, answer.json["rc"]) == (503, "ChatAdmissionDisabled")


def test_a_refused_body_comes_before_admission(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(horde, monkeypatch, chat_admission_enabled=False)
    answer = horde.submit(logprobs=True)
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")


def test_with_admission_off_what_is_queued_is_served(
    served: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = served.queue(), served.queue()
    switch(served, monkeypatch, chat_admission_enabled=False)
    job = served.take()
    assert served.reply(job["id"]).status_code == 200
    assert served.status(first)["done"]
    assert served.cancel(second).status_code == 200


def test_an_unknown_key_comes_before_targets_and_models(horde: ChatHorde) -> None:
    answer = horde.submit(
        key="nobody's key", model="nobody's/model", horde={"only": [str(uuid4())]}
    )
    assert (answer.status_code, answer.json["rc"]) == (401, "InvalidAPIKey")


def test_a_deleted_account_is_refused(served: ChatHorde) -> None:
    _, key = make_user(UserRoleTypes.DELETED)
    answer = served.submit(key=key)
    assert (answer.status_code, answer.json["rc"]) == (403, "DeletedUser")


@pytest.mark.parametrize("worker_id", ["string", "6ba7b810-9dad-11d1-80b4-00c04fd430c8"])
def test_an_unknown_worker_comes_before_the_model(horde: ChatHorde, worker_id: str) -> None:
    for listed in ("only", "ignore"):
        answer = horde.submit(model="nobody's/model", horde={listed: [worker_id]})
        assert (answer.status_code, answer.json["rc"]) == (404, "WorkerNotFound")
        assert worker_id in answer.json["message"]


def test_the_concurrency_limit_comes_before_the_model(served: ChatHorde) -> None:
    user_id, key = make_user(concurrency=1)
    make_request(user_id, is_chat=True, messages=[])
    answer = served.submit(key=key, model="nobody's/model")
    assert (answer.status_code, answer.json["rc"]) == (429, "TooManyPrompts")


def test_an_address_in_timeout_is_refused(served: ChatHorde) -> None:
    addresses.set_address_timeout("198.51.100.7", 0.1)
    answer = served.client.post(
        "/api/v2/generate/chat/async",
        json=build_chat_body("nobody's/model"),
        headers={"apikey": served.requester_key},
        environ_base={"REMOTE_ADDR": "198.51.100.7"},
    )
    assert (answer.status_code, answer.json["rc"]) == (403, "TimeoutIP")


def test_a_model_is_checked_before_the_context_is_sized(horde: ChatHorde) -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    for options in ({}, {"dry_run": True}):
        unknown = horde.submit(model="nobody's/model", messages=long, horde=options)
        assert (unknown.status_code, unknown.json["rc"]) == (404, "UnknownChatModel")
        unserved = horde.submit(model=KNOWN_MODEL, messages=long, horde=options)
        assert (unserved.status_code, unserved.json["rc"]) == (403, "NoEligibleWorker")
    assert count_rows() == (0, 0)


# --- known models
# --------------------------------------------------------------------------------------------------


def test_a_known_model_without_a_worker_is_refused_by_name(horde: ChatHorde) -> None:
    answer = horde.submit(model=KNOWN_MODEL)
    assert answer.status_code == 403
    assert answer.json == {
        "message": f"No worker is currently serving the model '{KNOWN_MODEL}'.",
        "rc": "NoEligibleWorker",
    }
    other = list_text_model_names()[1]
    answer = horde.submit(model=None, models=[KNOWN_MODEL, other])
    assert answer.json == {
        "message": f"No worker is currently serving any of the models '{KNOWN_MODEL}', '{other}'.",
        "rc": "NoEligibleWorker",
    }


def test_a_worker_in_maintenance_still_makes_a_model_known_and_served(horde: ChatHorde) -> None:
    make_chat_worker(horde.owner_id, MODEL, maintenance=True)
    assert horde.submit().status_code == 202


def test_a_worker_away_for_five_minutes_does_not(horde: ChatHorde) -> None:
    make_chat_worker(horde.owner_id, MODEL, last_check_in=utcnow() - timedelta(seconds=301))
    answer = horde.submit()
    assert (answer.status_code, answer.json["rc"]) == (404, "UnknownChatModel")


def test_a_text_worker_of_the_name_does_not_make_it_known(horde: ChatHorde) -> None:
    make_worker(horde.owner_id, (MODEL,))
    assert horde.submit().json["rc"] == "UnknownChatModel"


def test_the_first_unknown_entry_of_a_list_is_named(served: ChatHorde) -> None:
    answer = served.submit(model=None, models=[MODEL, "nobody's/model", "nobody's/other"])
    assert (answer.status_code, answer.json["rc"]) == (404, "UnknownChatModel")
    assert answer.json["message"].startswith("'models[1]'")


def test_one_served_entry_of_a_list_is_enough(served: ChatHorde) -> None:
    assert served.submit(model=None, models=[KNOWN_MODEL, MODEL]).status_code == 202


def test_a_model_name_of_megabytes_is_unknown_and_not_sent_back(served: ChatHorde) -> None:
    answer = served.submit(model="m" * 3_000_000)
    assert (answer.status_code, answer.json["rc"]) == (404, "UnknownChatModel")
    assert len(answer.json["message"]) < 1000


# --- the operation key
# ----------------------------------------------------------------------------------------------


def test_a_repeated_key_answers_with_the_first_request(
    served: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"operation_key": str(uuid4())}
    first = served.submit(horde=options)
    assert first.status_code == 202
    second = served.submit(horde=options)
    assert second.status_code == 200
    assert second.json == {"id": first.json["id"], "kudos": first.json["kudos"]}
    # The workers are gone, the horde is closed, and the answer stays the same.
    with transaction() as session:
        session.execute(delete(Worker))
    set_maintenance(on=True)
    switch(served, monkeypatch, chat_admission_enabled=False)
    third = served.submit(horde=options)
    assert (third.status_code, third.json) == (200, second.json)
    assert count_rows() == (1, 0)


def test_a_repeated_key_is_answered_after_the_end(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    first = served.submit(horde=options)
    assert served.reply(served.take()["id"]).status_code == 200
    again = served.submit(horde=options)
    assert (again.status_code, again.json["id"]) == (200, first.json["id"])


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "Name one animal."}]},
        {"max_tokens": 100},
        {"temperature": 0.5},
        {"horde": {"slow_workers": False}},
        {"tools": [build_tool()]},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_key_with_another_body_is_a_conflict(served: ChatHorde, change: dict[str, Any]) -> None:
    key = {"operation_key": str(uuid4())}
    served.queue(horde=key)
    answer = served.submit(**change | {"horde": change.get("horde", {}) | key})
    assert (answer.status_code, answer.json["rc"]) == (400, "OperationKeyConflict")


@pytest.mark.parametrize(
    "change",
    [
        {"max_completion_tokens": 512},
        {"max_tokens": 512},
        {"temperature": 1, "top_p": 1.0, "presence_penalty": 0},
        {
            "stream": False,
            "user": "somebody",
            "metadata": {"a": "b"},
            "stream_options": {"include_usage": True},
        },
        {"model": None, "models": [MODEL]},
        {"response_format": {"type": "text"}, "tools": []},
        {"horde": {"max_kudos": 5000}},
        {
            "horde": {
                "include_reasoning": False,
                "availability_mode": "fail_fast",
                "slow_workers": True,
            }
        },
    ],
)
def test_the_same_operation_in_other_words(served: ChatHorde, change: dict[str, Any]) -> None:
    key = {"operation_key": str(uuid4())}
    first = served.queue(horde=key)
    answer = served.submit(**change | {"horde": change.get("horde", {}) | key})
    assert (answer.status_code, answer.json["id"]) == (200, first)


def test_models_in_another_order_are_the_same_operation(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    first = served.submit(model=None, models=[KNOWN_MODEL, MODEL], horde=options)
    again = served.submit(model=None, models=[MODEL, KNOWN_MODEL], horde=options)
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json["id"] == first.json["id"]


def test_the_same_key_of_another_user_is_another_request(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    _, key = make_user()
    assert (
        served.submit(horde=options).json["id"] != served.submit(key=key, horde=options).json["id"]
    )


def test_a_dry_run_neither_looks_up_nor_claims_a_key(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    quote = served.submit(horde=options | {"dry_run": True})
    assert (quote.status_code, "id" in quote.json) == (200, False)
    served.queue(horde=options)
    quote = served.submit(horde=options | {"dry_run": True}, max_tokens=100)
    assert (quote.status_code, "resolved" in quote.json) == (200, True)


def test_a_refused_submission_claims_nothing(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    assert (
        served.submit(horde=options | {"max_kudos": 1}, max_tokens=1024).json["rc"]
        == "ChatKudosCapExceeded"
    )
    assert served.submit(horde=options).status_code == 202


def test_of_many_submissions_at_once_one_is_queued(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    barrier = threading.Barrier(4)
    answers: list[tuple[int, dict[str, Any]]] = []

    def send() -> None:
        barrier.wait()
        answer = served.submit(horde=options, max_tokens=BIG)
        answers.append((answer.status_code, answer.json))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in answers) == [200, 200, 200, 202], answers
    assert len({body["id"] for _, body in answers}) == 1
    assert len({body["kudos"] for _, body in answers}) == 1
    requests, _ = count_rows()
    assert requests == 1


def test_a_submission_refused_because_its_twin_took_the_last_place_gets_the_twins_answer(
    served: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = make_user(concurrency=1)
    options = {"operation_key": str(uuid4())}
    activate = queue_chat.activate
    twins: list[Any] = []

    def activate_after_the_twin_was_judged(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(queue_chat, "activate", activate)
        activate(*arguments, **named)
        monkeypatch.setattr(queue_chat, "_queue", lambda *_: refuse())
        twins.append(served.submit(key=key, horde=options))

    def refuse() -> None:
        raise TooManyRequests("Parallel requests", ReturnCode.TOO_MANY_PROMPTS)

    monkeypatch.setattr(queue_chat, "activate", activate_after_the_twin_was_judged)
    first = served.submit(key=key, horde=options)
    assert (first.status_code, twins[0].status_code) == (202, 200)
    assert twins[0].json["id"] == first.json["id"]


def test_the_loser_of_a_race_for_another_body_is_told_of_the_conflict(
    served: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"operation_key": str(uuid4())}
    store = queue_chat.store

    def store_after_another(*arguments: Any) -> None:
        store(*arguments)
        monkeypatch.setattr(queue_chat, "store", store)
        assert served.submit(horde=options).status_code == 202

    monkeypatch.setattr(queue_chat, "store", store_after_another)
    answer = served.submit(
        horde=options, messages=[{"role": "user", "content": "Something else."}], max_tokens=16
    )
    assert (answer.status_code, answer.json["rc"]) == (400, "OperationKeyConflict")
    assert count_rows() == (1, 0)


def test_a_shared_key_claims_for_its_owner(served: ChatHorde) -> None:
    options = {"operation_key": str(uuid4())}
    shared = make_shared_key(served.requester_id)
    first = served.submit(key=shared, horde=options)
    again = served.submit(horde=options)
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json["id"] == first.json["id"]


# --- context and length
# ---------------------------------------------------------------------------------------------


def test_a_length_above_every_worker_is_lowered_and_counted(served: ChatHorde) -> None:
    counting = Counting("horde.chat.max_length_lowered")
    request_id = served.queue(max_tokens=4096)
    assert served.status(request_id)["context_adjustments"][0] == {
        "from": 4096,
        "to": 1024,
        "reason": "worker_max_length",
    }
    lowered = {
        "horde.requested_bucket": "2049-4096",
        "horde.declared_bucket": "513-1024",
        "horde.dry_run": False,
    }
    assert counting.read() == [(lowered, 1)]
    assert get_stored(request_id).max_length == 1024


def test_the_context_grows_up_to_the_largest_worker(served: ChatHorde) -> None:
    text = [{"role": "user", "content": "x" * 3 * 3000}]
    request_id = served.queue(messages=text, horde={"context_fit": "grow"})
    assert served.status(request_id)["context_adjustments"] == [
        {"from": 2048, "to": 4096, "reason": "grow"}
    ]
    refused = served.submit(messages=text, horde={"context_fit": "reject"})
    assert (refused.status_code, refused.json["rc"]) == (400, "PromptExceedsContext")
    refused = served.submit(
        messages=[{"role": "user", "content": "x" * 3 * 8000}], horde={"context_fit": "grow"}
    )
    assert (refused.status_code, refused.json["rc"]) == (400, "PromptExceedsContext")


def test_the_oldest_turns_go_and_are_counted(served: ChatHorde) -> None:
    counting = Counting("horde.text.context_fit")
    turns = [
        {"role": role, "content": f"{number} " + "x" * 3000}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        *turns,
        {"role": "user", "content": "And now?"},
    ]
    quote = served.submit(messages=messages, max_tokens=64, horde={"dry_run": True})
    assert quote.json["resolved"]["context_fit"] == "grow"
    assert quote.json["resolved"]["estimated_prompt_tokens"] <= 8192 - 64
    request_id = served.queue(messages=messages, max_tokens=64)
    stored = get_stored(request_id)
    assert stored.messages is not None
    assert stored.messages[0] == messages[0]
    assert stored.messages[-1] == messages[-1]
    dropped = served.status(request_id)["context_adjustments"][-1]["dropped_messages"]
    assert len(stored.messages) == len(messages) - dropped
    assert stored.messages[1]["role"] == "user"
    assert stored.prompt.startswith("system: Be brief.\nuser: ")
    assert stored.submitted_prompt is not None
    assert len(stored.submitted_prompt) > len(stored.prompt)
    [(attributes, count)] = counting.read()
    assert (attributes, count) == (
        {"horde.outcome": "truncated", "horde.mode": "truncate_oldest"},
        2,
    )


def test_nothing_adjusted_is_null(served: ChatHorde) -> None:
    assert served.status(served.queue())["context_adjustments"] is None


# --- kudos
# --------------------------------------------------------------------------------------------------


def test_the_quote_is_the_price_of_the_202_and_of_the_dry_run(served: ChatHorde) -> None:
    quote = served.submit(max_tokens=256, horde={"dry_run": True}).json["kudos"]
    accepted = served.submit(max_tokens=256).json
    assert accepted["kudos"] == quote
    assert type(quote) is int
    assert set(accepted) == {"id", "kudos"}


def test_a_quote_above_the_cap_is_refused_with_both_numbers(served: ChatHorde) -> None:
    quote = served.submit(max_tokens=512, horde={"dry_run": True}).json["kudos"]
    for options in ({}, {"dry_run": True}):
        answer = served.submit(max_tokens=512, horde=options | {"max_kudos": quote - 1})
        assert answer.status_code == 400
        assert answer.json == {
            "message": (
                f"The request's kudos estimate at current pricing is {quote}, above its"
                f" horde.max_kudos of {quote - 1}. The estimate assumes the full max_tokens is"
                " generated."
            ),
            "rc": "ChatKudosCapExceeded",
        }
    assert count_rows() == (0, 0)
    assert served.submit(max_tokens=512, horde={"max_kudos": quote}).status_code == 202


def test_output_above_the_allowance_is_held(served: ChatHorde) -> None:
    for _ in range(4):
        served.queue(max_tokens=1024)
    decisions = Counting("horde.text.free_allowance.decisions")
    waits = Counting("horde.text.free_allowance.estimated_wait_seconds")
    text_queue.forget_queue_snapshot()
    request_id = served.queue(max_tokens=1024)
    with transaction() as session:
        hold = session.scalars(
            select(KudosReservation).where(
                KudosReservation.business_id == f"upfront:{request_id}", KudosReservation.active
            )
        ).one()
        assert hold.user_id == served.requester_id
    _, key = make_user()
    refused = served.submit(key=key, max_tokens=1024)
    assert (refused.status_code, refused.json["rc"]) == (403, "KudosUpfront")
    assert "tokens" in refused.json["message"]
    assert (
        served.submit(key=key, max_tokens=1024, horde={"dry_run": True}).json["rc"]
        == "KudosUpfront"
    )
    assert served.submit(key=key, max_tokens=512).status_code == 202
    outcomes = sorted(
        (attributes["horde.outcome"], count) for attributes, count in decisions.read()
    )
    assert outcomes == [("free", 1), ("funded", 1), ("refused", 1)]
    assert sum(count for _, count in waits.read()) == 3
    assert all(
        attributes == {"horde.chat": True, "horde.requester": "registered"}
        for attributes, _ in waits.read()
    )


def test_refusing_slow_workers_holds_at_once(horde: ChatHorde) -> None:
    make_chat_worker(horde.owner_id, MODEL, speed=50.0, chat_features=["prompt_overflow_refused"])
    _, key = make_user()
    answer = horde.submit(key=key, horde={"slow_workers": False})
    assert (answer.status_code, answer.json["rc"]) == (403, "KudosUpfront")
    assert horde.submit(horde={"slow_workers": False}).status_code == 202


def test_nobody_eligible_replaces_a_kudos_refusal(served: ChatHorde) -> None:
    _, key = make_user()
    answer = served.submit(key=key, max_tokens=BIG, seed=1, temperature=0.5)
    assert answer.status_code == 403
    assert answer.json == {
        "message": (
            "No online worker can serve this request: no online worker serving the model declares"
            " seed."
        ),
        "rc": "NoEligibleWorker",
        "impossible_reason": {
            "kind": "declaration_gap",
            "missing_declarations": ["seed"],
            "exceeded_limits": [],
        },
    }
    answer = served.submit(key=key, max_tokens=BIG, horde={"max_context_length": 16384})
    assert (
        answer.json["message"] == "No online worker can serve this request: "
        "the request exceeds the max_context_length limit of every online worker serving the model."
        " Shorten the messages, or lower 'horde.max_context_length'."
    )
    answer = served.submit(
        key=key, max_tokens=BIG, horde={"validated_backends": True, "slow_workers": False}
    )
    assert answer.json == {
        "message": "No online worker can serve this request.",
        "rc": "NoEligibleWorker",
    }
    assert count_rows() == (0, 0)


def test_nobody_eligible_is_queued_within_the_floor_with_a_warning(served: ChatHorde) -> None:
    answer = served.submit(seed=1)
    assert answer.status_code == 202
    assert answer.json["message"].startswith(
        "Warning: No available workers can fulfill this request. It will expire in 20 minutes."
    )
    status = served.status(answer.json["id"])
    assert (status["is_possible"], status["impossible_reason"]["missing_declarations"]) == (
        False,
        ["seed"],
    )


# --- shared keys
# --------------------------------------------------------------------------------------------------


def make_shared_key(owner_id: int, **columns: Any) -> str:
    with transaction() as session:
        shared = UserSharedKey(**{"user_id": owner_id, "kudos": 5000} | columns)
        session.add(shared)
        session.flush()
        return str(shared.id)


@pytest.mark.parametrize(
    ("columns", "rc"),
    [
        ({"kudos": 0}, "SharedKeyEmpty"),
        ({"expiry": utcnow() - timedelta(days=1)}, "SharedKeyExpired"),
        ({"kudos": 1}, "SharedKeyInsufficientKudos"),
    ],
)
def test_a_shared_key_that_cannot_pay(served: ChatHorde, columns: dict[str, Any], rc: str) -> None:
    answer = served.submit(key=make_shared_key(served.requester_id, **columns))
    assert (answer.status_code, answer.json["rc"]) == (403, rc)


def test_a_shared_key_with_a_limit_on_tokens(served: ChatHorde) -> None:
    shared = make_shared_key(served.requester_id, max_text_tokens=100)
    assert served.submit(key=shared, max_tokens=100).status_code == 202
    answer = served.submit(key=shared, max_tokens=101)
    assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")


def test_a_shared_key_pays_the_tax_and_the_charge(served: ChatHorde) -> None:
    shared = make_shared_key(served.requester_id)
    served.queue(key=shared)
    assert served.reply(served.take()["id"]).status_code == 200
    with transaction() as session:
        row = session.get_one(UserSharedKey, UUID(shared))
        assert (row.kudos, row.utilized) == (5000 - row.utilized, row.utilized)
        assert row.utilized >= 2


def test_nobody_eligible_replaces_the_refusal_of_a_shared_key(served: ChatHorde) -> None:
    answer = served.submit(
        key=make_shared_key(served.requester_id, kudos=1), max_tokens=BIG, seed=1
    )
    assert (answer.status_code, answer.json["rc"]) == (403, "NoEligibleWorker")
    assert answer.json["impossible_reason"]["missing_declarations"] == ["seed"]


# --- what is stored
# -------------------------------------------------------------------------------------------------


def test_a_request_is_stored_as_the_contract_says(served: ChatHorde) -> None:
    served.take_nothing(chat_features=["prompt_overflow_refused", "tools", "seed"])
    request_id = served.queue(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi", "name": "ann"},
        ],
        tools=[build_tool()],
        parallel_tool_calls=False,
        temperature=0.7,
        seed=-5,
        stop=["a", "a", "b"],
        horde={"conformance": "best_effort"},
    )
    stored = get_stored(request_id)
    assert stored.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
    ]
    assert stored.chat_extras == {"tools": [build_tool()], "parallel_tool_calls": False}
    assert stored.chat_required_features == ["seed", "tools"]
    assert (stored.chat_conformance, stored.chat_tools_temperature) == ("best_effort", 0.7)
    tools = json.dumps([build_tool()], separators=(",", ":"))
    assert stored.prompt == f"system: Be brief.\nuser: Hi\n{tools}"
    payload = served.take(chat_features=["prompt_overflow_refused", "tools", "seed"])["payload"]
    assert (payload["seed"], payload["stop_sequence"], "prompt" in payload) == (
        -5,
        ["a", "b"],
        False,
    )


def test_anonymous_may_ask(served: ChatHorde) -> None:
    assert served.submit(key=ANONYMOUS_KEY).status_code == 202


def test_a_request_is_found_by_its_id_only_in_its_family(served: ChatHorde) -> None:
    request_id = served.queue()
    assert find_request(UUID(request_id)) is not None
    headers = {"apikey": served.requester_key}
    for path in ("/generate/text/status/", "/generate/text/request/"):
        answer = served.client.get(f"/api/v2{path}{request_id}", headers=headers)
        assert (answer.status_code, answer.json["rc"]) == (404, "RequestNotFound")
    assert (
        served.client.delete(f"/api/v2/generate/text/status/{request_id}").json["rc"]
        == "RequestNotFound"
    )
    assert not served.status(request_id)["done"]


def test_a_request_is_flattened_once_on_its_whole_way(
    served: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, contents = FlattenedChat.read, []

    def count(messages: Any, tools: Any = None) -> FlattenedChat:
        contents.append([message["content"] for message in messages])
        return read(messages, tools)

    monkeypatch.setattr(FlattenedChat, "read", count)
    served.queue(messages=[{"role": "user", "content": "Name one colour."}])
    assert contents == [["Name one colour."]]


# --- moderation
# --------------------------------------------------------------------------------------------------


def test_a_rewrite_is_mirrored_onto_every_message(served: ChatHorde) -> None:
    with transaction() as session:
        session.execute(
            insert(Filter), {"regex": "dragon", "filter_type": 10, "replacement": "lizard"}
        )
        session.execute(
            insert(Filter), {"regex": "unspeakable", "filter_type": 10, "replacement": ""}
        )
    caches.clear_all()
    _, key = make_user(UserRoleTypes.FLAGGED)
    messages = [
        {"role": "system", "content": "unspeakable"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "A dragon"},
                {"type": "text", "text": "unspeakable"},
            ],
        },
    ]
    request_id = served.queue(key=key, messages=messages)
    stored = get_stored(request_id)
    with transaction() as session:
        session.execute(delete(Filter))
    caches.clear_all()
    assert stored.messages == [
        {"role": "system", "content": ""},
        {
            "role": "user",
            "content": [{"type": "text", "text": "A lizard"}, {"type": "text", "text": ""}],
        },
    ]
    assert stored.prompt == "system: \nuser: A lizard\n"
    assert stored.submitted_prompt == "system: unspeakable\nuser: A dragon\nunspeakable"
    assert served.take()["payload"]["messages"] == stored.messages


# --- decisions are counted by who asks
# ------------------------------------------------------------------------------


def test_a_decision_is_counted_by_who_asked(served: ChatHorde) -> None:
    decisions = Counting("horde.text.free_allowance.decisions")
    waits = Counting("horde.text.free_allowance.estimated_wait_seconds")
    served.submit(key=ANONYMOUS_KEY, max_tokens=600)
    served.submit(key=make_shared_key(served.requester_id), max_tokens=100)
    served.submit(key=ANONYMOUS_KEY, max_tokens=600, seed=1)
    served.submit(max_tokens=600, horde={"dry_run": True})
    shared = {"horde.chat": True}
    anonymous = shared | {"horde.requester": "anonymous", "horde.requested_bucket": "513-1024"}
    expected = [
        anonymous | {"horde.outcome": "free", "horde.allowance_bucket": "2049-4096"},
        anonymous | {"horde.outcome": "refused", "horde.allowance_bucket": "<=512"},
        shared
        | {
            "horde.requester": "shared_key",
            "horde.outcome": "free",
            "horde.requested_bucket": "<=512",
            "horde.allowance_bucket": "2049-4096",
        },
    ]
    moved = [attributes for attributes, count in decisions.read() if count == 1]
    assert len(moved) == 3
    assert all(attributes in moved for attributes in expected)
    requesters = sorted(attributes["horde.requester"] for attributes, _ in waits.read())
    assert requesters == ["anonymous", "shared_key"]


def test_a_lowered_dry_run_is_counted_as_one(served: ChatHorde) -> None:
    counting = Counting("horde.chat.max_length_lowered")
    served.submit(max_tokens=2000, horde={"dry_run": True})
    [(attributes, count)] = counting.read()
    assert (attributes["horde.dry_run"], attributes["horde.requested_bucket"], count) == (
        True,
        "1025-2048",
        1,
    )


# --- rate limits
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(
        service_urls,
        "chat_limits",
        rate_limits_enabled=True,
        chat_request_2sec_limit="4/hour",
        chat_request_90min_limit="100/hour",
        text_request_2sec_limit="3/hour",
        text_request_90min_limit="100/hour",
        whitelisted_addresses=("198.51.100.9",),
    ) as horde:
        yield horde


def send_from(horde: ChatHorde, address: str, key: str, path: str = "chat", **headers: str) -> int:
    body = build_chat_body() if path == "chat" else {"prompt": "Once"}
    return horde.client.post(
        f"/api/v2/generate/{path}/async",
        json=body,
        headers={"apikey": key, **headers},
        environ_base={"REMOTE_ADDR": address},
    ).status_code


def test_an_address_has_the_chat_limit(limited: ChatHorde) -> None:
    start_anew()
    answers = [send_from(limited, "198.51.100.1", f"nobody {number}") for number in range(5)]
    assert answers == [401] * 4 + [429]


def test_a_key_has_the_text_limit_and_each_route_counts_alone(limited: ChatHorde) -> None:
    start_anew()
    limited.take_nothing()
    answers = [
        send_from(limited, f"198.51.100.{number}", limited.requester_key)
        for number in range(20, 24)
    ]
    assert answers == [202, 202, 202, 429]
    assert send_from(limited, "198.51.100.20", limited.requester_key, "text") == 202


def test_a_refused_body_is_counted_too(limited: ChatHorde) -> None:
    start_anew()
    for _ in range(4):
        limited.client.post(
            "/api/v2/generate/chat/async",
            data=b"{",
            content_type="application/json",
            environ_base={"REMOTE_ADDR": "198.51.100.30"},
        )
    answer = limited.client.post(
        "/api/v2/generate/chat/async",
        data=b"{",
        content_type="application/json",
        environ_base={"REMOTE_ADDR": "198.51.100.30"},
    )
    assert answer.status_code == 429
    assert "rc" not in answer.json
    assert "Retry-After" in answer.headers


def test_a_whitelisted_address_has_the_limits_of_text(limited: ChatHorde) -> None:
    start_anew()
    answers = [send_from(limited, "198.51.100.9", f"nobody {number}") for number in range(6)]
    assert answers == [401] * 6


def test_clients_behind_a_known_passkey_are_counted_apart(limited: ChatHorde) -> None:
    start_anew()
    limited.take_nothing()
    make_user(UserRoleTypes.SERVICE, proxy_passkey="a known passkey")
    headers = {"Proxy-Authorization": "a known passkey"}
    for number in range(3):
        _, key = make_user()
        client = {"Proxied-For": f"203.0.113.{number}"}
        assert [
            send_from(limited, "198.51.100.40", key, **headers, **client) for _ in range(3)
        ] == [202] * 3
    made_up = [
        send_from(
            limited, "198.51.100.41", f"nobody {number}", **{"Proxied-For": f"203.0.113.{number}"}
        )
        for number in range(5)
    ]
    assert made_up[-1] == 429
