# SPDX-License-Identifier: AGPL-3.0-or-later
"""Mistakes in addresses and keys: put right, or one sentence and the end."""

import logging
import threading
from typing import Any

import httpx
import pytest

from horde.bridge.addresses import parse_address, parse_key, trusts_environment
from horde.bridge.backend import Backend
from horde.bridge.horde_api import HordeApi
from horde.bridge.loop import Bridge
from tests.unit.bridge.scripted import (
    KEY,
    NO_JOB,
    Script,
    answer,
    build_config,
    build_inputs,
    build_plan,
    chat_answer,
    completion,
    llama_script,
)

POP, HEARTBEAT = "/api/v2/generate/text/pop", "/api/v2/status/heartbeat"
PAGE = httpx.Response(200, text="<html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("http://h.test/api/", "http://h.test/api"),
        (" https://h.test:81/api ", "https://h.test:81/api"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://h.test/api/v2", "http://h.test/api"),
        ("http://[::1]:7001/api", "http://[::1]:7001/api"),
    ],
)
def test_an_address_is_read_as_it_was_meant(typed: str, address: str) -> None:
    assert parse_address(typed, "--api", "/v2") == address


@pytest.mark.parametrize(
    "typed", ["", "ftp://h.test", "http://", "http://h.test/?key=secret", "http://h.test:port", "/"]
)
def test_what_is_no_address_is_refused_by_the_options_name(typed: str) -> None:
    with pytest.raises(ValueError, match="--api is an address") as caught:
        parse_address(typed, "--api")
    assert "secret" not in str(caught.value)


def test_blanks_around_a_key_are_dropped_and_what_no_header_carries_is_refused() -> None:
    assert (parse_key(" key\n", "--key"), parse_key("  ", "--key")) == ("key", None)
    for key in ("two words", "line\nbreak", "schlüssel", "nul\x00"):
        with pytest.raises(ValueError, match="--key") as caught:
            parse_key(key, "--key")
        assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "trusts"),
    [
        ("http://127.0.0.1:1", False),
        ("http://[::1]:1", False),
        ("http://localhost:1", False),
        ("https://h.test", True),
        ("http://10.0.0.1", True),
    ],
)
def test_a_proxy_of_the_environment_is_not_for_this_machine(address: str, trusts: bool) -> None:
    assert trusts_environment(address) is trusts


def run(
    api_url: str, horde: Script, backend: Script, backend_url: str = "http://backend.test/v1"
) -> tuple[int, Bridge]:
    """A bridge that is stopped after its first accepted pop or ends by itself; its exit code."""
    changes = {"api_url": api_url, "backend_url": backend_url}
    config = build_config(**changes)
    client = HordeApi(api_url, KEY, "a:1:u", transport=horde.transport)
    bridge = Bridge(
        config, client, Backend(backend_url, None, transport=backend.transport), build_inputs()
    )
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(bridge.run()))
    stopper = threading.Timer(3, bridge.stop)
    stopper.start()
    thread.start()
    thread.join(60)
    stopper.cancel()
    return codes[0], bridge


def list_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(vars(record)["reason"]) for record in caplog.records if "reason" in vars(record)]


@pytest.mark.parametrize("address", ["http://h.test", "http://h.test/v1", "http://h.test/api"])
def test_an_api_address_without_its_ending_is_corrected_and_the_log_says_so(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    horde = Script({POP: answer(NO_JOB), HEARTBEAT: answer({"message": "OK"})})
    with caplog.at_level(logging.INFO):
        code, _ = run(address, horde, llama_script())
    assert code == 0
    assert horde.bodies(POP)
    corrected = [record for record in caplog.records if "api_address" in record.message]
    assert [vars(record)["api"] for record in corrected] == (
        [] if address.endswith("/api") else ["http://h.test/api"]
    )


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/v1/models": answer({"object": "list", "data": []})}, "OpenAI-compatible front"),
        ({"/v1/models": answer({"error": {"message": "no key"}}, 401)}, "OpenAI-compatible front"),
        ({}, "No horde answers"),
        ({POP: PAGE, HEARTBEAT: PAGE, "/v1/models": PAGE}, "No horde answers"),
        ({POP: httpx.Response(302, headers={"Location": "/login"})}, "No horde answers"),
    ],
)
def test_an_address_without_a_horde_is_one_sentence_and_the_end(
    answers: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    horde = Script(answers)
    code, _ = run("http://h.test/api", horde, llama_script())
    (reason,) = list_reasons(caplog)
    assert (code, words in reason) == (2, True)
    assert not any("apikey" in headers for headers in horde.headers[1:])


def test_a_horde_behind_another_scheme_is_found() -> None:
    def redirect(request: httpx.Request) -> httpx.Response:
        if request.url.scheme == "http":
            return httpx.Response(
                301, headers={"Location": str(request.url.copy_with(scheme="https"))}
            )
        return horde.handle(request)

    horde = Script({POP: answer(NO_JOB), HEARTBEAT: answer({"message": "OK"})})
    client = HordeApi("http://h.test/api", KEY, "a:1:u", transport=httpx.MockTransport(redirect))
    client.correct_address()
    assert client.pop({}) is None


def test_a_backend_behind_another_scheme_is_found_and_no_password_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = llama_script()

    def redirect(request: httpx.Request) -> httpx.Response:
        if request.url.scheme == "http":
            location = str(request.url.copy_with(scheme="https"))
            return httpx.Response(308, headers={"Location": location})
        return script.handle(request)

    backend = Backend(
        "http://me:secret@backend.test/v1", None, transport=httpx.MockTransport(redirect)
    )
    assert backend.list_models()
    assert backend.find("/props")
    assert "secret" not in " ".join(str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("typed", ["http://backend.test", "http://backend.test/v1"])
def test_a_backend_address_without_v1_is_corrected(
    typed: str, caplog: pytest.LogCaptureFixture
) -> None:
    horde = Script(
        {
            POP: [answer(chat_answer()), answer(NO_JOB)],
            "/api/v2/generate/text/submit": answer({"reward": 1}),
        }
    )
    backend = Script(
        {
            "/v1/models": answer({"data": [{"id": "m", "max_model_len": 2048}]}),
            "/v1/chat/completions": completion(),
        }
    )
    code, _ = run("http://h.test/api", horde, backend, typed)
    assert (code, len(backend.bodies("/v1/chat/completions"))) == (0, 1)
    corrected = [record for record in caplog.records if "backend_address" in record.message]
    assert len(corrected) == (0 if typed.endswith("/v1") else 1)


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": answer({"error": "no"}, 401)},
        {"/v1/models": answer({"error": "no"}, 403)},
        {"/props": answer({"error": {"message": "Invalid API Key"}}, 401)},
        {"/v1/chat/completions": answer({"error": "no"}, 401)},
    ],
)
def test_a_backend_that_refuses_its_key_is_one_sentence_and_the_end(
    answers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend = llama_script()
    backend.answers |= answers
    horde = Script(
        {POP: answer(chat_answer()), "/api/v2/generate/text/submit": answer({"reward": 0})}
    )
    code, _ = run("http://h.test/api", horde, backend)
    reasons = [reason for reason in list_reasons(caplog) if "--backend-key" in reason]
    assert (code, len(reasons)) == (2, 1)


@pytest.mark.parametrize(
    "models",
    [
        answer({}, 404),
        answer({}, 405),
        PAGE,
        answer({"object": "x"}),
        answer({"data": [{"id": "m", "owned_by": "aihorde"}]}),
    ],
)
def test_an_address_without_a_backend_is_one_sentence_and_the_end(
    models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    code, _ = run("http://h.test/api", Script({}), Script({"/v1/models": models}))
    (reason,) = list_reasons(caplog)
    assert (code, "--backend" in reason) == (2, True)


def test_a_service_without_a_list_of_models_is_served_by_the_operators_word() -> None:
    script = Script({"/v1/chat/completions": completion()})
    plan = build_plan(script, backend_model="m", max_context_length=4096)
    assert (plan.model, plan.profile.context_tokens) == ("m", 4096)


def test_a_key_that_is_refused_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horde.bridge.pace.FIRST_RETRY_SECONDS", 0.01)
    backend = llama_script(
        chat=[completion(), answer({}, 401), completion()],
        models=[
            llama_script().answers["/v1/models"],
            answer({}, 401),
            llama_script().answers["/v1/models"],
        ],
    )
    pops = [answer(chat_answer())] * 3
    horde = Script(
        {POP: [*pops, answer(NO_JOB)], "/api/v2/generate/text/submit": answer({"reward": 0})}
    )
    code, _ = run("http://h.test/api", horde, backend)
    states = [body.get("state", "ok") for body in horde.bodies("/api/v2/generate/text/submit")]
    assert (code, states) == (0, ["ok", "faulted", "ok"])


def test_serving_is_said_once_the_horde_has_let_the_worker_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = Script({POP: answer({"rc": "InvalidAPIKey", "message": "no"}, 401)})
    with caplog.at_level(logging.INFO):
        run("http://h.test/api", refused, llama_script())
        events = [record.message for record in caplog.records]
        assert "horde.bridge.backend_found" in events
        assert "horde.bridge.serving" not in events
        run("http://h.test/api", Script({POP: answer(NO_JOB)}), llama_script())
    assert [record.message for record in caplog.records].count("horde.bridge.serving") == 1
