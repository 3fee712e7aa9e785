# SPDX-License-Identifier: AGPL-3.0-or-later
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from horde.bridge import loop, pace, planner, popping
from horde.bridge.jobs import Job
from horde.bridge.loop import Bridge
from horde.bridge.pace import compute_idle_seconds, compute_retry_seconds
from horde.bridge.submitting import RunningJob
from tests.unit.bridge.scripted import (
    KEY,
    NO_JOB,
    Script,
    answer,
    build_backend,
    build_config,
    build_horde,
    build_inputs,
    build_job,
    build_plan,
    chat_answer,
    completion,
    llama_script,
    text_answer,
)

POP, SUBMIT = "/api/v2/generate/text/pop", "/api/v2/generate/text/submit"
REWARD = {"reward": 3.5}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "IDLE_STEPS", ((0, 0.01),))
    monkeypatch.setattr(pace, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(popping, "MAINTENANCE_PAUSE_SECONDS", 0.01)


def horde_script(*pops: Any, submits: Any = None) -> Script:
    return Script({POP: [*pops, answer(NO_JOB)], SUBMIT: submits or answer(REWARD)})


def run_until(
    done: Callable[[], bool], horde: Script, backend: Script | None = None, **changes: Any
) -> int:
    """Run a bridge until ``done``, stop it, and return its exit code."""
    bridge = Bridge(
        build_config(**changes),
        build_horde(horde),
        build_backend(backend or llama_script()),
        build_inputs(),
    )
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(bridge.run()))
    runner.start()
    deadline = time.monotonic() + 5
    while not done() and runner.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    bridge.stop()
    runner.join(60)
    assert not runner.is_alive()
    return codes[0]


def submitted(horde: Script, count: int = 1) -> Callable[[], bool]:
    return lambda: len(horde.bodies(SUBMIT)) >= count


@pytest.mark.parametrize(
    ("empty_pops", "seconds"), [(1, 1.0), (9, 1.0), (10, 2.0), (24, 2.0), (25, 3.0), (900, 3.0)]
)
def test_an_idle_worker_slows_down(
    empty_pops: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert compute_idle_seconds(empty_pops) == seconds


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 1.0), (2, 2.0), (4, 8.0), (7, 60.0), (5000, 60.0)]
)
def test_failures_are_waited_out_exponentially(
    failures: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert compute_retry_seconds(failures) == seconds


def test_an_outcome_is_claimed_once() -> None:
    running = RunningJob(build_job(chat_answer(), build_plan()))
    assert [running.claim(), running.claim()] == [True, False]


def test_jobs_are_popped_served_and_submitted() -> None:
    horde = horde_script(answer(chat_answer()), answer(text_answer()))
    assert run_until(submitted(horde, 2), horde) == 0
    assert [body["id"] for body in horde.bodies(SUBMIT)] == ["job-1", "job-2"]
    assert horde.headers[0]["apikey"] == KEY


def test_a_submit_is_repeated_with_the_same_body_until_it_is_answered() -> None:
    submits = [answer({}, 503), httpx.ReadTimeout("slow"), answer({}, 429), answer(REWARD)]
    horde = horde_script(answer(chat_answer()), submits=submits)
    run_until(submitted(horde, 4), horde)
    first, *others = horde.bodies(SUBMIT)
    assert others == [first] * 3


@pytest.mark.parametrize(
    "rc", ["ChatSubmitInvalid", "ChatSubmitNonconformant", "ChatModelMismatch"]
)
def test_a_refused_reply_is_given_back_as_refused(rc: str) -> None:
    horde = horde_script(
        answer(chat_answer()),
        submits=[answer({"rc": rc, "message": "no"}, 400), answer({"reward": 0})],
    )
    run_until(submitted(horde, 2), horde)
    assert horde.bodies(SUBMIT)[1] == {
        "id": "job-1",
        "state": "faulted",
        "model_id": "tiny",
        "fault_reason": "reply_refused",
    }


@pytest.mark.parametrize(
    ("status", "rc"), [(404, "InvalidJobID"), (400, "DuplicateGen"), (400, "AbortedGen")]
)
def test_a_settled_job_is_dropped(status: int, rc: str) -> None:
    horde = horde_script(
        answer(chat_answer()),
        answer(text_answer()),
        submits=[answer({"rc": rc}, status), answer(REWARD)],
    )
    run_until(submitted(horde, 2), horde)
    assert [body["id"] for body in horde.bodies(SUBMIT)] == ["job-1", "job-2"]


def test_failed_pops_are_tried_again() -> None:
    pops = [
        httpx.ConnectError("refused"),
        answer({}, 502),
        answer({"rc": "WorkerMaintenance"}, 403),
    ]
    horde = horde_script(*pops, answer(chat_answer()))
    assert run_until(submitted(horde), horde) == 0


def test_a_page_in_place_of_an_answer_is_waited_out_once_the_horde_was_there() -> None:
    horde = horde_script(
        answer(NO_JOB), httpx.Response(200, text="<html>"), answer({}, 404), answer(chat_answer())
    )
    assert run_until(submitted(horde), horde) == 0


def test_a_worker_that_was_never_let_in_ends_with_1() -> None:
    horde = Script({POP: answer({"rc": "InvalidAPIKey", "message": "no user"}, 401)})
    assert run_until(lambda: False, horde) == 1


def test_a_worker_that_was_let_in_waits_out_the_same_refusal() -> None:
    horde = horde_script(
        answer(NO_JOB), answer({"rc": "WrongCredentials"}, 403), answer(chat_answer())
    )
    assert run_until(submitted(horde), horde) == 0


@pytest.mark.parametrize("seconds_until_model", [2])
def test_a_backend_that_lists_a_model_before_it_has_one_is_waited_for(
    seconds_until_model: int,
) -> None:
    loading = answer({"error": {"message": "Loading model"}}, 503)
    backend = llama_script()
    backend.answers["/props"] = [loading] * seconds_until_model + [backend.answers["/props"]]
    horde = horde_script(answer(chat_answer()))
    assert run_until(submitted(horde), horde, backend) == 0
    assert horde.bodies(POP)[0]["max_context_length"] == 2048


def test_a_backend_without_a_known_context_ends_the_bridge() -> None:
    backend = Script({"/v1/models": answer({"data": [{"id": "m"}]})})
    assert run_until(lambda: False, horde_script(), backend) == 1


def test_nothing_is_popped_before_the_backend_answers() -> None:
    models = answer({"data": [{"id": "tiny", "owned_by": "llamacpp"}]})
    backend = llama_script(models=[httpx.ConnectError("starting"), answer({}, 503), models])
    horde = horde_script(answer(chat_answer()))
    run_until(submitted(horde), horde, backend)
    paths = [path for path, _ in backend.requests]
    assert paths[:3] == ["/v1/models"] * 3


def test_a_lost_backend_faults_one_job_and_is_probed_before_the_next() -> None:
    backend = llama_script(
        chat=[httpx.ConnectError("gone"), answer({"choices": [{"message": {"content": "x"}}]})]
    )
    horde = horde_script(answer(chat_answer()), answer(chat_answer()))
    run_until(submitted(horde, 2), horde, backend)
    assert [body.get("fault_reason") for body in horde.bodies(SUBMIT)] == ["generation_error", None]
    assert len(backend.bodies("/v1/models")) == 2


def test_an_idle_backend_that_was_restarted_with_another_model_is_announced_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "PROBE_AGAIN_SECONDS", 0.0)
    other = answer({"data": [{"id": "other", "owned_by": "llamacpp"}]})
    backend = llama_script(
        models=[llama_script().answers["/v1/models"], httpx.ConnectError("x"), other]
    )
    horde = horde_script()

    def is_announced() -> bool:
        return horde.bodies(POP)[-1:] != [] and horde.bodies(POP)[-1]["models"] == ["other"]

    assert run_until(is_announced, horde, backend) == 0
    assert horde.bodies(POP)[0]["models"] == ["tiny"]
    assert is_announced()


def test_a_service_without_the_route_for_texts_is_offered_chats_alone() -> None:
    backend = llama_script(complete=answer({"error": {"message": "no such route"}}, 404))
    horde = horde_script(answer(text_answer()), answer(chat_answer()))
    run_until(submitted(horde, 2), horde, backend)
    assert [body["prompt_jobs"] for body in horde.bodies(POP)[:2]] == [True, False]
    assert horde.bodies(SUBMIT)[1]["message"]["content"] == "Blue."


def test_a_worker_whose_backend_does_not_come_back_is_taken_offline_until_it_does() -> None:
    lost = httpx.ConnectError("gone")
    models = llama_script().answers["/v1/models"]
    backend = llama_script(chat=[lost, completion()], models=[models, *[lost] * 6, models])
    horde = horde_script(answer(chat_answer()), answer(NO_JOB), answer(chat_answer()))
    run_until(submitted(horde, 2), horde, backend)
    leaving = [body.get("leaving", False) for body in horde.bodies(POP)]
    assert leaving[:3] == [False, True, False]
    assert [body.get("fault_reason") for body in horde.bodies(SUBMIT)] == ["generation_error", None]


def test_a_thread_that_waits_for_the_backend_does_not_hold_up_a_job_of_another() -> None:
    """The one probes a backend that does not come back; the other has a job in its hands."""
    is_probing, is_answered, has_probed = (threading.Event() for _ in range(3))
    models = llama_script().answers["/v1/models"]

    def list_models(_body: dict[str, Any]) -> httpx.Response:
        if not backend.bodies("/v1/chat/completions"):
            return models  # type: ignore[return-value]
        is_probing.set()
        is_answered.wait(60)
        has_probed.set()
        return models  # type: ignore[return-value]

    def pop(_body: dict[str, Any]) -> httpx.Response:
        turn = len(horde.bodies(POP))
        if turn == 2:
            is_probing.wait(60)
        return answer({**chat_answer(), "id": f"job-{turn}"} if turn < 3 else NO_JOB)

    backend = llama_script(chat=[httpx.ConnectError("gone"), completion()], models=list_models)

    def submit(body: dict[str, Any]) -> httpx.Response:
        if body["id"] == "job-2":
            was_held_up.append(has_probed.is_set())
            is_answered.set()
        return answer(REWARD)

    was_held_up: list[bool] = []
    horde = Script({POP: pop, SUBMIT: submit})
    run_until(lambda: bool(was_held_up), horde, backend, threads=2)
    assert was_held_up == [False]


def test_an_unforeseen_payload_is_given_back() -> None:
    horde = horde_script(answer(chat_answer(tools=[{"type": "function"}])), answer(text_answer()))
    run_until(submitted(horde, 2), horde)
    assert horde.bodies(SUBMIT)[0]["fault_reason"] == "generation_error"


def test_a_stop_lets_a_running_job_finish() -> None:
    started, release = threading.Event(), threading.Event()

    def chat(_body: dict[str, Any]) -> httpx.Response:
        started.set()
        release.wait(60)
        return answer({"choices": [{"message": {"content": "late"}}]})

    horde = horde_script(answer(chat_answer()), answer(chat_answer()))

    def stop_soon() -> bool:
        if started.is_set():
            threading.Timer(0.2, release.set).start()
        return started.is_set()

    assert run_until(stop_soon, horde, llama_script(chat=chat)) == 0
    finished, *_ = horde.bodies(SUBMIT)
    assert finished["message"]["content"] == "late"


def test_a_worker_that_is_stopped_takes_itself_offline_after_its_last_job() -> None:
    horde = horde_script(answer(chat_answer()))
    assert run_until(submitted(horde), horde) == 0
    *before, last = horde.bodies(POP)
    assert last == {**before[-1], "leaving": True}
    assert not any("leaving" in body for body in before)
    assert horde.requests[-1][0] == POP


def test_a_job_handed_out_to_a_worker_that_leaves_is_given_back() -> None:
    def pop(body: dict[str, Any]) -> httpx.Response:
        return answer(chat_answer() if body.get("leaving") else NO_JOB)

    horde = Script({POP: pop, SUBMIT: answer(REWARD)})
    assert run_until(lambda: bool(horde.bodies(POP)), horde) == 0
    assert horde.bodies(SUBMIT) == [{"id": "job-1", "state": "faulted", "model_id": "tiny"}]


@pytest.mark.parametrize("goodbye", [httpx.ConnectError("gone"), answer({}, 503), answer({}, 404)])
def test_a_horde_that_is_away_does_not_keep_a_worker_from_leaving(goodbye: Any) -> None:
    def pop(body: dict[str, Any]) -> httpx.Response:
        if body.get("leaving") and isinstance(goodbye, Exception):
            raise goodbye
        return goodbye if body.get("leaving") else answer(NO_JOB)

    horde = Script({POP: pop})
    assert run_until(lambda: bool(horde.bodies(POP)), horde) == 0
    assert horde.bodies(POP)[-1]["leaving"] is True


def test_a_worker_that_was_never_let_in_has_nothing_to_leave() -> None:
    horde = Script({POP: answer({"rc": "InvalidAPIKey"}, 401)})
    run_until(lambda: False, horde)
    assert not any("leaving" in body for body in horde.bodies(POP))


def test_a_job_that_outlasts_the_grace_period_is_given_back_once() -> None:
    started, release = threading.Event(), threading.Event()

    def chat(_body: dict[str, Any]) -> httpx.Response:
        started.set()
        release.wait(1)
        return answer({"choices": [{"message": {"content": "too late"}}]})

    horde = horde_script(answer(chat_answer()))
    assert run_until(started.is_set, horde, llama_script(chat=chat), grace_seconds=0.1) == 0
    assert [body.get("state") for body in horde.bodies(SUBMIT)] == ["faulted"]


def test_the_log_holds_neither_key_nor_prompt_nor_reply(caplog: pytest.LogCaptureFixture) -> None:
    horde = horde_script(
        answer(chat_answer()), answer(text_answer()), answer(chat_answer(seed="x", tools=[{}]))
    )
    with caplog.at_level(logging.DEBUG):
        run_until(submitted(horde, 3), horde)
    logged = " ".join(str(vars(record)) for record in caplog.records)
    assert "horde.bridge.job_done" in logged
    assert not any(
        secret in logged for secret in (KEY, "Name one colour", "Blue.", "Once", " and then")
    )


def test_a_job_that_fails_in_a_way_nobody_foresaw_is_given_back_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = loop.serve_job

    def fail_first(job: Job, *rest: Any) -> Any:
        monkeypatch.setattr(loop, "serve_job", served)
        raise RuntimeError("a prompt")

    monkeypatch.setattr(loop, "serve_job", fail_first)
    horde = horde_script(answer(chat_answer()), answer(chat_answer()))
    assert run_until(submitted(horde, 2), horde) == 0
    first, second = horde.bodies(SUBMIT)[:2]
    assert (first["state"], second.get("state", "ok")) == ("faulted", "ok")
    assert "a prompt" not in str([vars(record) for record in caplog.records])
