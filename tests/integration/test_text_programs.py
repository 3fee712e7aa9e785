# SPDX-License-Identifier: AGPL-3.0-or-later
"""Programs that people use, as sessions: what each sends in its order, and what it takes from each
answer. `test_text_clients` has those that pop or bring their own models of the answers.
"""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes
from tests.integration.api_horde import Api, own_api
from tests.integration.rows import forget_everything, make_user
from tests.integration.text_horde import forget_copies, refused

MODEL = "koboldcpp/Some Model 13B"
REPLY = " and they lived on."
KCPP_AGENT = "KoboldCppEmbedWorker:2:https://github.com/LostRuins/koboldcpp"


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "text_programs") as api:
        yield api


class Worker:
    """A koboldcpp at work, of which the programs know nothing but what the lists tell."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.owner_id, self.key = make_user(UserRoleTypes.TRUSTED)
        self.name = f"kcpp {self.owner_id}"
        self.pop()

    def pop(self) -> dict[str, Any]:
        body = {
            "name": self.name,
            "models": [MODEL],
            "max_length": 512,
            "max_context_length": 8192,
            "priority_usernames": [],
            "softprompts": [],
            "bridge_agent": KCPP_AGENT,
        }
        answer = self._api.post("/generate/text/pop", body, self.key)
        assert answer.status_code == 200, answer.json
        forget_copies()
        return dict(answer.json)

    def serve(self, text: str = REPLY) -> dict[str, Any]:
        """Take one job and submit it; its payload."""
        job = self.pop()
        assert job["id"] is not None, job
        reply = {"id": job["id"], "generation": text, "state": "ok"}
        answer = self._api.post("/generate/text/submit", reply, self.key)
        assert f"{answer.json['reward']:.0f}"
        return dict(job["payload"])


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    forget_copies()
    return module_api


@pytest.fixture
def worker(api: Api) -> Worker:
    return Worker(api)


def read_ok(answer: Any) -> Any:
    """The body of an answer that a program takes for a success."""
    assert answer.status_code == 200, answer.json
    assert answer.content_type.startswith("application/json")
    return answer.json


def test_silly_tavern_chooses_models_asks_and_gives_up_politely(api: Api, worker: Worker) -> None:
    agent = {"Client-Agent": "SillyTavern:UNKNOWN:Cohee#1207"}
    assert api.get("/status/heartbeat", **agent).status_code == 200
    models = read_ok(api.get("/status/models?type=text", **agent))
    assert [model["name"] for model in models] == [MODEL]
    workers = read_ok(api.get("/workers?type=text", **agent))
    fitting = [each for each in workers if MODEL in each["models"]]
    # It asks for no more than the smallest worker of the model takes.
    context = min(each["max_context_length"] for each in fitting)
    length = min(each["max_length"] for each in fitting)
    _, key = make_user(kudos=1000)
    found = read_ok(api.get("/find_user", key, **agent))
    assert f"{found['username']}: {found['kudos']} kudos, {found['trusted']}"
    request = {
        "prompt": "Once",
        "params": {
            "n": 1,
            "max_context_length": context,
            "max_length": length,
            "rep_pen": 1.1,
            "temperature": 0.7,
            "top_a": 0,
            "tfs": 1,
            "typical": 1,
            "use_default_badwordsids": False,
            "sampler_order": [6, 0, 1, 3, 4, 2, 5],
            "stop_sequence": ["\nYou:"],
            "singleline": False,
        },
        "trusted_workers": False,
        "models": [MODEL],
        "use_default_badwordsids": False,
    }
    queued = api.post("/generate/text/async", request, key, **agent)
    assert queued.status_code == 202
    path = f"/generate/text/status/{queued.json['id']}"
    first = read_ok(api.get(path, **agent))
    assert first["is_possible"] is True
    assert not first["faulted"]
    worker.serve()
    done = read_ok(api.get(path, **agent))
    assert done["done"] is True
    (generation,) = done["generations"]
    assert (generation["text"], generation["worker_name"]) == (REPLY, worker.name)
    # Somebody else's is stopped: the answer is parsed.
    other = api.post("/generate/text/async", request, key, **agent).json["id"]
    stopped = read_ok(api.delete(f"/generate/text/status/{other}", key))
    assert stopped["done"] is False
    assert worker.pop()["id"] is None


def test_kobold_lite_lists_sums_asks_and_reads_twice(api: Api, worker: Worker) -> None:
    preflight = api.call("OPTIONS", "/generate/text/async")
    assert 200 <= preflight.status_code < 300
    allowed = preflight.headers["Access-Control-Allow-Headers"].lower()
    assert all(name in allowed for name in ("apikey", "client-agent", "content-type"))
    figures = read_ok(api.get("/status/performance"))
    shown = (
        figures["queued_text_requests"],
        figures["text_worker_count"],
        figures["queued_tokens"],
        figures["past_minute_tokens"],
    )
    assert all(isinstance(number, int | float) for number in shown)
    (listed,) = read_ok(api.get("/workers?type=text"))
    unit = " tokens per second"
    assert listed["performance"] == "No requests fulfilled yet" or unit in listed["performance"]
    assert (listed["team"], bool(listed["models"])) == ({"name": None, "id": None}, True)
    request = {
        "prompt": "Once",
        "params": {
            "max_context_length": 8192,
            "max_length": 240,
            "rep_pen": 1.07,
            "rep_pen_range": 360,
            "rep_pen_slope": 0.7,
            "temperature": 0.75,
            "tfs": 1,
            "top_a": 0,
            "top_k": 100,
            "top_p": 0.92,
            "min_p": 0,
            "typical": 1,
            "sampler_order": [6, 0, 1, 3, 4, 2, 5],
            "singleline": False,
            "frmttriminc": False,
            "frmtrmblln": False,
            "n": 1,
            "quiet": True,
        },
        "models": [MODEL],
        "workers": [],
        "worker_blacklist": False,
    }
    queued = api.post("/generate/text/async", request, ANONYMOUS_KEY)
    assert (queued.status_code, bool(queued.json["id"])) == (202, True)
    path = f"/generate/text/status/{queued.json['id']}"
    waiting = read_ok(api.get(path))
    assert (waiting.get("message"), waiting["is_possible"], waiting["faulted"]) == (
        None,
        True,
        False,
    )
    assert isinstance(waiting["wait_time"], int)
    assert isinstance(waiting["queue_position"], int)
    worker.serve()
    assert read_ok(api.get(path))["done"] is True
    assert read_ok(api.get(path))["generations"][0]["text"] == REPLY


def test_kobold_lite_manages_the_workers_of_a_key(api: Api, worker: Worker) -> None:
    own = read_ok(api.get("/find_user", worker.key))
    (worker_id,) = own["worker_ids"]
    shown = read_ok(api.get(f"/workers/{worker_id}"))
    assert (shown["name"], shown["maintenance_mode"]) == (worker.name, False)
    change = {"maintenance": True, "info": "Back soon", "name": f"{worker.name} (new)"}
    assert read_ok(api.put(f"/workers/{worker_id}", change, worker.key)) == change
    assert read_ok(api.get(f"/workers/{worker_id}"))["maintenance_mode"] is True
    deleted = read_ok(api.delete(f"/workers/{worker_id}", worker.key))
    assert deleted["deleted_id"] == worker_id
    assert refused(api.get(f"/workers/{worker_id}")) == (404, "WorkerNotFound")


def test_the_command_line_client_quotes_asks_for_any_model_and_reads_twice(
    api: Api, worker: Worker
) -> None:
    template = {
        "prompt": "Once",
        "params": {"n": 1, "max_context_length": 1024, "max_length": 80},
        "models": [],
        "workers": [],
        "trusted_workers": False,
    }
    quoted = read_ok(api.post("/generate/text/async", template | {"dry_run": True}, ANONYMOUS_KEY))
    assert isinstance(quoted["kudos"], int | float)
    assert "id" not in quoted
    queued = api.post("/generate/text/async", template, ANONYMOUS_KEY)
    path = f"/generate/text/status/{queued.json['id']}"
    worker.serve("")
    assert read_ok(api.get(path))["done"] is True
    assert read_ok(api.get(path))["generations"][0]["text"] == ""


def test_zelda_narrows_answers_and_keeps_the_raw_error(api: Api, worker: Worker) -> None:
    headers = {"Client-Agent": "@zeldafan0225/ai_horde:Version_5:github", "X-Fields": "name,count"}
    assert read_ok(api.get("/status/models?type=text", **headers)) == [{"name": MODEL, "count": 1}]
    assert read_ok(api.get("/status/models")) == []  # without a type it lists image models
    assert read_ok(api.get("/status/heartbeat"))["message"] == "OK"
    found = read_ok(api.get("/find_user", worker.key, **{"X-Fields": "username,id"}))
    assert set(found) == {"username", "id"}
    empty = api.post("/generate/text/async", {"prompt": ""}, ANONYMOUS_KEY)
    assert refused(empty) == (400, "MissingPrompt")
    unknown = api.get(f"/generate/text/status/{uuid4()}")
    assert refused(unknown) == (404, "RequestNotFound")
    assert json.loads(unknown.data)["message"]
    queued = api.post("/generate/text/async", {"prompt": "Once", "models": [MODEL]}, worker.key)
    cached = read_ok(api.delete(f"/generate/text/status/{queued.json['id']}", None))
    assert cached["generations"] == []


def test_llm_horde_takes_the_first_model_of_a_worker_and_waits_for_done(
    api: Api, worker: Worker
) -> None:
    names = {each["models"][0] for each in read_ok(api.get("/workers?type=text"))}
    assert names == {MODEL}
    body = {"prompt": "Once", "params": {"max_length": 80}, "models": list(names)}
    queued = api.post("/generate/text/async", body, ANONYMOUS_KEY)
    path = f"/generate/text/status/{queued.json['id']}"
    assert read_ok(api.get(path))["done"] is False
    worker.serve()
    body = read_ok(api.get(path))
    assert (body["done"], body["generations"][0]["text"]) == (True, REPLY)


def test_what_is_given_up_is_done_for_who_looks_at_nothing_else(api: Api, worker: Worker) -> None:
    """OpenCorde and llm-horde wait for `done` alone."""
    flags = {
        "trusted_workers": False,
        "validated_backends": False,
        "slow_workers": True,
        "extra_slow_workers": False,
        "worker_blacklist": False,
        "allow_downgrade": True,
        "disable_batching": False,
        "dry_run": False,
        "nsfw": True,
        "cluster": "best",
    }
    body = {"prompt": "Once", "models": [MODEL], "params": {"max_length": 80}, **flags}
    queued = api.post("/generate/text/async", body, ANONYMOUS_KEY)
    path = f"/generate/text/status/{queued.json['id']}"
    for _ in range(3):
        assert read_ok(api.get(path))["done"] is False
        job = worker.pop()
        fault = {"id": job["id"], "state": "faulted", "generation": "faulted", "seed": -1}
        assert read_ok(api.post("/generate/text/submit", fault, worker.key))["reward"] == 0
    ended = read_ok(api.get(path))
    assert (ended["done"], ended["faulted"], ended["waiting"]) == (True, True, 0)


def test_the_openai_bridge_gets_only_workers_of_known_backends(api: Api, worker: Worker) -> None:
    """oaiproxy asks for validated backends unless it is told otherwise."""
    agent = {"name": f"odd {worker.owner_id}", "models": [MODEL], "bridge_agent": "My Bridge:1:x"}
    api.post("/generate/text/pop", agent, worker.key)
    body = {
        "prompt": "Once",
        "models": [MODEL],
        "validated_backends": True,
        "params": {"max_length": 80, "max_context_length": 1024, "n": 1},
    }
    queued = api.post("/generate/text/async", body, ANONYMOUS_KEY)
    assert api.post("/generate/text/pop", agent, worker.key).json["id"] is None
    first = read_ok(api.get(f"/generate/text/status/{queued.json['id']}"))
    assert {"done", "faulted", "is_possible"} <= set(first)
    assert first["is_possible"] is True
    payload = worker.serve()
    assert {"prompt", "max_length", "max_context_length", "n"} <= set(payload)
    assert None not in payload.values()
    ended = read_ok(api.get(f"/generate/text/status/{queued.json['id']}"))
    assert ended["generations"][0]["text"] == REPLY
