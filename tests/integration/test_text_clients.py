# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bodies that real text workers and clients send, and what they take from the answers."""

from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from horde_sdk.ai_horde_api.apimodels import (
    DeleteTextGenerateRequest,
    TextGenerateAsyncDryRunResponse,
    TextGenerateAsyncRequest,
    TextGenerateAsyncResponse,
    TextGenerateJobPopRequest,
    TextGenerateJobPopResponse,
    TextGenerateStatusRequest,
    TextGenerateStatusResponse,
    TextGenerationJobSubmitRequest,
)
from horde_sdk.ai_horde_api.apimodels.base import JobSubmitResponse
from horde_sdk.generic_api.apimodels import RequestErrorResponse
from pydantic import BaseModel
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde.classes.base.user import UserRoleTypes, generate_api_key, hash_api_key
from tests.integration.rows import SECRET, make_user
from tests.integration.text_horde import (
    KNOWN,
    TextHorde,
    own_text_horde,
    refused,
    require_worker,
    start_clean,
)

NUMBERS = ("finished", "processing", "restarted", "waiting", "wait_time", "queue_position", "kudos")


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_clients") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


@pytest.fixture(scope="module")
def key(app: Flask) -> str:
    return make_user(UserRoleTypes.TRUSTED)[1]


# KoboldCpp's embedded worker


def pop_as_koboldcpp(horde: TextHorde, key: str) -> dict[str, Any]:
    body = {
        "name": "kcpp",
        "models": ["koboldcpp/Llama-3.1-8B-Instruct"],
        "max_length": 512,
        "max_context_length": 4096,
        "priority_usernames": [],
        "softprompts": [],
        "bridge_agent": "KoboldCppEmbedWorker:2:https://github.com/LostRuins/koboldcpp",
    }
    answer = horde.post(
        "pop",
        body,
        key,
        **{"Client-Agent": "KoboldCppEmbedWorker:2", "User-Agent": "KoboldCppEmbedWorkerV2"},
    )
    assert answer.status_code == 200
    assert isinstance(answer.json, dict)
    return answer.json


def test_koboldcpp_serves_a_job_and_prints_its_reward(horde: TextHorde, key: str) -> None:
    assert pop_as_koboldcpp(horde, key)["id"] is None
    horde.queue(params={"max_length": 64, "rep_pen": 1.1})
    job = pop_as_koboldcpp(horde, key)
    assert None not in job["payload"].values()
    answer = horde.post("submit", {"id": job["id"], "generation": "text", "state": "ok"}, key)
    assert answer.status_code == 200
    assert f"{answer.json['reward']:.0f}".isdigit()


def test_koboldcpp_pops_the_next_job_before_it_submits_the_last(horde: TextHorde, key: str) -> None:
    horde.queue(params={"n": 2})
    first, second = pop_as_koboldcpp(horde, key), pop_as_koboldcpp(horde, key)
    for job in (first, second):
        assert (
            horde.post(
                "submit", {"id": job["id"], "generation": "", "state": "ok"}, key
            ).status_code
            == 200
        )


# The scribe bridge


def pop_as_scribe(
    horde: TextHorde, key: str, agent: str = "AI Horde Worker~unknown~oai:24:https://x"
) -> dict[str, Any]:
    body = {
        "name": "scribe",
        "models": [KNOWN],
        "max_length": 512,
        "max_context_length": 2048,
        "priority_usernames": [],
        "softprompts": ["a softprompt"],
        "bridge_agent": agent,
        "threads": 1,
    }
    answer = horde.post("pop", body, key)
    assert answer.status_code == 200
    assert isinstance(answer.json, dict)
    return answer.json


def test_scribe_finds_what_it_indexes_and_nothing_of_an_image_job(
    horde: TextHorde, key: str
) -> None:
    horde.queue()
    payload = pop_as_scribe(horde, key)["payload"]
    assert {"prompt", "max_length", "max_context_length"} <= set(payload)
    assert not {"width", "length", "steps", "softprompt"} & set(payload)


def test_scribe_submits_without_a_state(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    job = pop_as_scribe(horde, key)
    answer = horde.post("submit", {"id": job["id"], "generation": "text", "seed": 0}, key)
    assert f"{float(answer.json['reward']):.1f}"
    assert horde.status(request_id)["generations"][0]["text"] == "text"


def test_scribe_faults_a_job_in_its_own_form_and_drops_on_a_repeat(
    horde: TextHorde, key: str
) -> None:
    request_id = horde.queue()
    job = pop_as_scribe(horde, key)
    body = {"id": job["id"], "state": "faulted", "generation": "faulted", "seed": -1}
    for _ in range(2):
        answer = horde.post("submit", body, key)
        assert (answer.status_code, answer.json) == (200, {"reward": 0.0})
    assert horde.status(request_id)["waiting"] == 1
    assert refused(
        horde.post("submit", {"id": job["id"], "generation": "late", "seed": 0}, key)
    ) == (400, "AbortedGen")


def test_scribes_growing_agent_is_never_refused(horde: TextHorde, key: str) -> None:
    pop_as_scribe(horde, key, "AI Horde Worker~unknown" + "~kai~oai" * 400 + ":24:https://x")
    assert len(require_worker("scribe").bridge_agent) == 1000


# horde_sdk


def send(horde: TextHorde, request: Any, key: str) -> TestResponse:
    """Send as the SDK does: set keys alone, what belongs to the path and the headers elsewhere."""
    outside = [*request.get_header_fields(), "apikey"]
    body = request.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=set(outside))
    url = request.get_api_endpoint_subpath().format(id=str(getattr(request, "id_", "")))
    path = "/api" + str(url) if str(url).startswith("/v2") else "/api/v2" + str(url)
    headers = {"apikey": key, "Client-Agent": "horde_sdk:0.33:x", "Accept": "application/json"}
    client = horde.app.test_client()
    method = str(request.get_http_method().value)
    if method in {"GET", "DELETE"}:
        return client.open(path, method=method, headers=headers)
    return client.open(path, method=method, headers=headers, json=body)


def read[R: BaseModel](answer: TestResponse, model: type[R], status: int) -> R:
    assert answer.status_code == status, answer.json
    assert isinstance(answer.json, dict)
    return model.model_validate(answer.json)


@pytest.fixture(scope="module")
def sdk_key(app: Flask) -> str:
    """A key of the length that the SDK insists on."""
    key = generate_api_key()
    make_user(UserRoleTypes.TRUSTED, api_key=hash_api_key(key, SECRET))
    return key


def test_the_sdk_asks_pops_submits_and_reads(horde: TextHorde, sdk_key: str) -> None:
    asked = TextGenerateAsyncRequest(
        apikey=sdk_key,
        prompt="Once upon a time",
        models=[KNOWN],
        params={
            "n": 2,
            "max_length": 64,
            "temperature": 0.7,
            "stop_sequence": ["\n"],
            "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        },
        workers=[],
        trusted_workers=False,
    )
    queued = read(send(horde, asked, sdk_key), TextGenerateAsyncResponse, 202)
    pop = TextGenerateJobPopRequest(
        apikey=sdk_key,
        name="sdk worker",
        models=[KNOWN],
        bridge_agent="KoboldCppEmbedWorker:2:x",
        amount=2,
        max_length=512,
    )
    job = read(send(horde, pop, sdk_key), TextGenerateJobPopResponse, 200)
    assert (len(job.ids), job.id_, job.ttl) == (2, job.ids[0], 150)
    assert job.payload.prompt == "Once upon a time"
    for job_id in job.ids:
        submit = TextGenerationJobSubmitRequest(
            apikey=sdk_key, id=job_id, generation="and so on", state="ok"
        )
        assert read(send(horde, submit, sdk_key), JobSubmitResponse, 200).reward > 0
    status = TextGenerateStatusRequest(id=queued.id_)
    shown = read(send(horde, status, sdk_key), TextGenerateStatusResponse, 200)
    assert (shown.done, len(shown.generations), shown.generations[0].text) == (True, 2, "and so on")
    cancel = DeleteTextGenerateRequest(id=queued.id_)
    assert read(send(horde, cancel, sdk_key), TextGenerateStatusResponse, 200).done


def test_the_sdk_reads_an_idle_pop(horde: TextHorde, sdk_key: str) -> None:
    horde.queue(models=["another/model"])
    pop = TextGenerateJobPopRequest(
        apikey=sdk_key, name="sdk worker", models=[KNOWN], bridge_agent="x:1:y", softprompts=None
    )
    idle = read(send(horde, pop, sdk_key), TextGenerateJobPopResponse, 200)
    assert (idle.id_, idle.ids, idle.skipped.models) == (None, [], 1)


def test_the_sdk_reads_a_dry_run(horde: TextHorde, sdk_key: str) -> None:
    asked = TextGenerateAsyncRequest(apikey=sdk_key, prompt="Once", models=[KNOWN], dry_run=True)
    dry = read(send(horde, asked, sdk_key), TextGenerateAsyncDryRunResponse, 200)
    assert dry.kudos > 0
    assert dry.resolved is not None
    assert dry.resolved.prompt == "Once"


def test_the_sdk_reads_refusals(horde: TextHorde, sdk_key: str) -> None:
    for body in ({"prompt": ""}, {"prompt": "x", "params": {"n": 99}}, {}):
        answer = horde.post("async", body, sdk_key)
        assert RequestErrorResponse.model_validate(answer.json).message


# hclient: every default, integers as integers


def test_hclient_sends_its_defaults_and_reads_integers(horde: TextHorde, key: str) -> None:
    params = {
        "n": 1, "frmtadsnsp": False, "frmtrmblln": False, "frmtrmspch": False, "frmttriminc": False,
        "max_context_length": 1024,
        "max_length": 80, "rep_pen": 3, "rep_pen_range": 4096, "rep_pen_slope": 10,
        "singleline": False, "temperature": 5,
        "tfs": 1, "top_a": 1, "top_k": 100, "top_p": 1, "typical": 1,
        "sampler_order": [0, 1, 2, 3, 4, 5, 6],
        "use_default_badwordsids": True, "stop_sequence": [], "min_p": 0, "smoothing_factor": 0,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
    }  # fmt: skip
    body = {
        "prompt": "Once", "params": params, "softprompt": None, "trusted_workers": False,
        "slow_workers": True, "workers": [],
        "worker_blacklist": False, "models": [], "dry_run": False,
    }  # fmt: skip
    answer = horde.post("async", body, None, Apikey="0000000000")
    assert answer.status_code == 202
    assert isinstance(answer.json["kudos"], int | float)
    horde.submit(key, horde.take_job(key), "text")
    status = horde.status(answer.json["id"])
    assert [name for name in NUMBERS if status[name] != int(status[name])] == []
    (generation,) = status["generations"]
    assert generation["state"] in {"ok", "censored"}
    assert (generation["seed"], generation["gen_metadata"]) == (0, [])


# pyAIH, Lite, SillyTavern, OpenCorde


def test_pyaih_divides_the_wait_by_one_and_a_half(horde: TextHorde) -> None:
    request_id = horde.queue()
    for _ in range(20):  # a wait of nothing makes it read without a pause
        assert int(horde.status(request_id)["wait_time"] / 1.5) >= 0


def test_a_status_has_no_message(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    assert horde.status(request_id).get("message") is None
    horde.submit(key, horde.take_job(key))
    assert horde.status(request_id).get("message") is None


def test_keys_of_other_programs_are_ignored(horde: TextHorde) -> None:
    answer = horde.ask(
        quiet=True,
        cluster="00000000-0000-0000-0000-000000000000",
        use_default_badwordsids=False,
        worker_blacklist=False,
        trusted_workers=False,
        validated_backends=False,
        slow_workers=True,
        extra_slow_workers=False,
        allow_downgrade=False,
        disable_batching=False,
        dry_run=False,
        params={
            "n": 1,
            "genkey": "KCPP1234",
            "xtc_threshold": 0.1,
            "mirostat": 0,
            "max_context_length": 8192,
            "max_length": 240,
        },
        headers={"Client-Agent": "SillyTavern:UNKNOWN:Cohee#1207"},
    )
    assert answer.status_code == 202


def test_every_answer_is_json(horde: TextHorde, key: str) -> None:
    client = horde.app.test_client()
    answers = [
        client.get("/api/v2/generate/text/status/nothing"),
        client.get("/api/v2/generate/text/async"),
        client.post("/api/v2/generate/text/async", data="text", content_type="text/plain"),
        client.post(
            "/api/v2/generate/text/pop",
            data=b"{",
            content_type="application/json",
            headers={"apikey": key},
        ),
        horde.ask("no such key"),
    ]
    assert [answer.status_code for answer in answers] == [404, 405, 415, 400, 401]
    for answer in answers:
        refused(answer)
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
    preflight = client.options("/api/v2/generate/text/async")
    assert 200 <= preflight.status_code < 300
    assert {"apikey", "Client-Agent", "X-Fields", "Content-Type"} <= set(
        preflight.headers["Access-Control-Allow-Headers"].replace(" ", "").split(",")
    )
