# SPDX-License-Identifier: AGPL-3.0-or-later
"""Stored responses, those in the background, and their streams, over a Redis of the tests' own.

Numbers are those of the form's checklist.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis import Redis
from sqlalchemy import select

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.db import transaction
from horde.oai.responses_form import store as store_module
from tests.integration._fake_chat_worker import MODEL, Body, build_call, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    get_error,
    run_front,
    run_front_stack,
    wait_until,
)
from tests.integration.front_streams import list_request_ids, post_progress
from tests.integration.own_redis import OwnRedis
from tests.integration.responses_front import (
    PATH,
    TOOLS_DECLARED,
    ResponseStream,
    ask,
    build_function,
    check_events,
    post,
    read_events,
    refuse,
    respond,
)

SECRET = "a-secret-of-the-tests"
ANONYMOUS = "0000000000"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses, redis: OwnRedis) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls,
        "responses_stored",
        redis_url=f"{service_urls.redis_url}/7",
        poll_seconds=1.0,
        no_worker_grace_seconds=2 * PATIENCE_SECONDS,
        responses_redis_url=redis.url,
        responses_key_secret=SECRET,
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack, redis: OwnRedis) -> None:
    start_anew()
    run(redis, "FLUSHALL")


def call(
    stack: FrontStack, method: str, path: str, *, key: str | None = None, url: str | None = None
) -> httpx.Response:
    """A call of a stored route."""
    headers = {"authorization": f"Bearer {key or stack.horde.requester_key}"}
    return stack.call(method, f"{url or ''}{PATH}/{path}", headers=headers)


def run(redis: OwnRedis, *words: str) -> Any:
    """The answer of a command in the database of the responses."""
    with Redis.from_url(redis.url, decode_responses=True) as client:
        return client.execute_command(*words)


def is_cancelled(native_id: str) -> bool:
    with transaction() as session:
        outcome = session.scalar(
            select(WaitingPrompt.terminal_outcome).where(WaitingPrompt.id == native_id)
        )
    return outcome == "cancelled"


def get(stack: FrontStack, response: Body, **more: Any) -> httpx.Response:
    return call(stack, "GET", str(response["id"]), **more)


def get_code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(get_error(answer)["code"])


def await_end(stack: FrontStack, response: Body, **more: Any) -> Body:
    """The object of a response that ends."""

    def find() -> Body | None:
        answer = get(stack, response, **more)
        assert answer.status_code == 200, answer.text
        body = dict(answer.json())
        return body if body["status"] not in ("queued", "in_progress") else None

    return wait_until(find)


def start(stack: FrontStack, **changes: Any) -> Body:
    """A response in the background."""
    answer = post(stack, background=True, **changes)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_63_nothing_is_kept_unless_it_is_asked_for(stack: FrontStack, redis: OwnRedis) -> None:
    response, _ = respond(stack)
    assert response["store"] is False
    assert get_code(get(stack, response)) == (404, "response_not_found")
    assert run(redis, "KEYS", "*") == []


def test_64_a_stored_response_is_for_its_key_alone(stack: FrontStack, redis: OwnRedis) -> None:
    response, _ = respond(stack, store=True, metadata={"a": "b"})
    assert response["store"] is True
    assert get(stack, response).json() == response
    other, unknown = (
        get(stack, response, key=stack.horde.owner_key),
        call(stack, "GET", "resp_00000000-0000-0000-0000-000000000000"),
    )
    assert get_code(other) == get_code(unknown) == (404, "response_not_found")
    assert set(other.json()["error"]) == set(unknown.json()["error"])
    for name in ("", "nonsense", "resp_", "resp_%2e%2e", "resp_" + "a" * 5000, "resp_%00"):
        assert call(stack, "GET", name or "%20").status_code == 404
    kept = " ".join(
        str(run(redis, "HGETALL", key)) for key in run(redis, "KEYS", "*record*")
    ) + str(run(redis, "KEYS", "*"))
    assert stack.horde.requester_key not in kept
    assert all(run(redis, "TTL", key) > 0 for key in run(redis, "KEYS", "*"))


def test_65_a_response_goes_on_from_another(stack: FrontStack) -> None:
    first, _ = respond(stack, "Blue.", store=True, instructions="Be brief.")
    second, payload = respond(
        stack, "Green.", store=True, input="Another one.", previous_response_id=first["id"]
    )
    said = [(message["role"], message["content"]) for message in payload["messages"]]
    assert [role for role, _ in said] == ["user", "assistant", "user"]
    assert said[1][1] == "Blue."
    _, payload = respond(stack, previous_response_id=second["id"], instructions="Be long.")
    roles = [message["role"] for message in payload["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


def test_65_calls_of_an_earlier_response_are_answered(stack: FrontStack) -> None:
    first, _ = respond(
        stack,
        None,
        pop=TOOLS_DECLARED,
        reply={"tool_calls": [build_call()], "finish_reason": "tool_calls"},
        tools=[build_function()],
        store=True,
    )
    answered = {
        "type": "function_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "21 degrees",
    }
    _, payload = respond(
        stack, pop=TOOLS_DECLARED, input=[answered], previous_response_id=first["id"]
    )
    assert [message["role"] for message in payload["messages"]] == ["user", "assistant", "tool"]
    referred = [{"role": "user", "content": "hi"}, {"id": first["output"][0]["id"]}, answered]
    _, payload = respond(stack, pop=TOOLS_DECLARED, input=referred)
    assert payload["messages"][1]["tool_calls"][0]["id"] == answered["call_id"]
    assert refuse(stack, input=[{"type": "item_reference", "id": "msg_1"}])[:3] == (
        404,
        "item_not_found",
        "input[0].id",
    )


def test_66_a_chain_with_a_lost_link_is_not_continued(stack: FrontStack) -> None:
    first, _ = respond(stack, store=True)
    second, _ = respond(stack, store=True, previous_response_id=first["id"])
    assert call(stack, "DELETE", first["id"]).status_code == 200
    before = list_request_ids()
    for id_ in (second["id"], first["id"], "resp_1", ""):
        status, code, param, message = refuse(stack, previous_response_id=id_)
        assert (status, code, param) == (404, "previous_response_not_found", "previous_response_id")
        assert "store: true" in message
    assert list_request_ids() == before


def test_67_life_ends(stack: FrontStack) -> None:
    with run_front(replace(stack.config, responses_ttl_seconds=1)) as url:
        stack.horde.take_nothing()
        waiting = ask(stack, store=True, url=url)
        stack.horde.reply(stack.await_job()["id"])
        response = waiting.result(PATIENCE_SECONDS).json()
        wait_until(lambda: get(stack, response, url=url).status_code == 404)
        assert refuse(stack, previous_response_id=response["id"])[0] == 404


def test_68_a_response_is_deleted_once(stack: FrontStack, redis: OwnRedis) -> None:
    response, _ = respond(stack, store=True)
    answer = call(stack, "DELETE", response["id"])
    assert answer.json() == {"id": response["id"], "object": "response", "deleted": True}
    assert get_code(call(stack, "DELETE", response["id"])) == (404, "response_not_found")
    assert run(redis, "KEYS", "*record*") == run(redis, "KEYS", "*lease*") == []


def test_69_the_input_is_listed_in_pages(stack: FrontStack) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    response, _ = respond(stack, store=True, input=items)
    path = f"{response['id']}/input_items"
    page = call(stack, "GET", f"{path}?limit=2").json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "1"]
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
    rest = call(stack, "GET", f"{path}?limit=2&after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["0"]
    assert rest["has_more"] is False
    ascending = call(stack, "GET", f"{path}?order=asc").json()
    assert [item["content"][0]["text"] for item in ascending["data"]] == ["0", "1", "2"]
    for query in ("after=nothing", "limit=0", "limit=101", "limit=x", "order=up"):
        answer = call(stack, "GET", f"{path}?{query}")
        assert get_code(answer) == (400, "invalid_value")
        assert get_error(answer)["param"] == query.split("=")[0]
    assert get_code(call(stack, "GET", path, key=stack.horde.owner_key))[0] == 404


def test_70_nothing_is_stored_for_everybody(stack: FrontStack) -> None:
    for changes, param in (({"store": True}, "store"), ({"background": True}, "background")):
        assert refuse(stack, key=ANONYMOUS, **changes)[:3] == (403, "key_not_allowed", param)


def test_03_every_route_needs_a_key(stack: FrontStack) -> None:
    for method, path in (
        *(("POST", PATH), ("GET", f"{PATH}/resp_1"), ("DELETE", f"{PATH}/resp_1")),
        *(("POST", f"{PATH}/resp_1/cancel"), ("GET", f"{PATH}/resp_1/input_items")),
    ):
        answer = stack.call(method, path)
        assert get_code(answer) == (401, "missing_api_key")
    assert list_request_ids() == []


def test_a_record_has_a_largest_size(stack: FrontStack) -> None:
    with run_front(replace(stack.config, responses_max_bytes=2000)) as url:
        assert refuse(stack, url=url, store=True, input="a" * 3000)[:3] == (
            413,
            "request_too_large",
            "store",
        )


def test_the_oldest_response_makes_room(stack: FrontStack) -> None:
    with run_front(replace(stack.config, responses_per_key=2)) as url:
        stored = []
        for _ in range(3):
            stack.horde.take_nothing()
            waiting = ask(stack, store=True, url=url)
            stack.horde.reply(stack.await_job()["id"])
            stored.append(waiting.result(PATIENCE_SECONDS).json())
    assert [get(stack, response).status_code for response in stored] == [404, 200, 200]


def test_a_client_that_leaves_a_stored_response_has_it_cancelled(
    stack: FrontStack, redis: OwnRedis
) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack, store=True) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl")
        stream.await_text("Bl")
        response = stream.events[0]["response"]
    wait_until(lambda: get(stack, response).json()["status"] == "cancelled")


def test_a_failure_is_stored(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = ask(stack, store=True)
    for number in range(3):
        stack.horde.fault(stack.await_job(name=f"worker {number}")["id"])
    answer = waiting.result(PATIENCE_SECONDS)
    assert get_code(answer) == (502, "generation_failed")
    id_ = get_error(answer)["metadata"]["request_id"]
    stored = call(stack, "GET", f"resp_{id_}").json()
    assert (stored["status"], stored["error"]["code"]) == ("failed", "generation_failed")
    assert refuse(stack, previous_response_id=f"resp_{id_}")[:3] == (
        400,
        "invalid_value",
        "previous_response_id",
    )


def test_71_without_redis_only_what_needs_it_is_refused(stack: FrontStack, tmp_path: Path) -> None:
    own = OwnRedis(tmp_path)  # never started
    with run_front(replace(stack.config, responses_redis_url=own.url)) as url:
        for changes, param in (
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"previous_response_id": "resp_1-1"}, "previous_response_id"),
        ):
            answer = post(stack, url=url, **changes)
            assert get_code(answer) == (503, "response_store_unavailable")
            assert (get_error(answer)["param"], answer.headers["retry-after"]) == (param, "5")
        assert list_request_ids() == []
        assert get_code(call(stack, "GET", "resp_1", url=url))[0] == 503
        assert stack.call("GET", f"{url}/health/ready").json()["store"] is False
        stack.horde.take_nothing()
        waiting = ask(stack, url=url)
        stack.horde.reply(stack.await_job()["id"])
        assert waiting.result(PATIENCE_SECONDS).json()["status"] == "completed"
    assert stack.call("GET", "/health/ready").json()["store"] is True


def test_71_a_reply_is_delivered_though_redis_was_lost(stack: FrontStack, tmp_path: Path) -> None:
    own = OwnRedis(tmp_path)
    own.start()
    with run_front(replace(stack.config, responses_redis_url=own.url)) as url:
        stack.horde.take_nothing()
        waiting = ask(stack, url=url, store=True)
        job = stack.await_job()
        own.kill()
        stack.horde.reply(job["id"])
        response = waiting.result(PATIENCE_SECONDS).json()
    assert (response["status"], response["store"]) == ("completed", False)


# --- in the background
# ------------------------------------------------------------------------------------------


def test_72_a_response_in_the_background_is_polled(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    response = start(stack)
    assert (response["status"], response["background"], response["store"]) == ("queued", True, True)
    job = stack.await_job()
    stack.horde.reply(job["id"], "Blue.", prompt_tokens=3, completion_tokens=2)
    ended = await_end(stack, response)
    assert (ended["status"], ended["usage"]["total_tokens"]) == ("completed", 5)
    assert ended["output"][0]["content"][0]["text"] == "Blue."
    assert get(stack, response).json() == ended


def test_a_response_that_redis_lost_while_it_ran_is_a_clear_404(
    stack: FrontStack, tmp_path: Path
) -> None:
    own = OwnRedis(tmp_path)
    own.start()
    try:
        with run_front(replace(stack.config, responses_redis_url=own.url)) as url:
            stack.horde.take_nothing()
            lost = post(stack, url=url, background=True).json()
            job = stack.await_job()
            own.kill()
            assert get_code(get(stack, lost, url=url)) == (503, "response_store_unavailable")
            own.start()  # empty
            wait_until(lambda: get(stack, lost, url=url).status_code == 404)
            assert get_code(get(stack, lost, url=url)) == (404, "response_not_found")
            stack.horde.reply(job["id"])
            assert get_code(get(stack, lost, url=url)) == (404, "response_not_found")
            # The front goes on as before.
            kept = post(stack, url=url, background=True).json()
            stack.horde.reply(stack.await_job()["id"])
            assert await_end(stack, kept, url=url)["status"] == "completed"
    finally:
        own.kill()


def test_72_a_failure_in_the_background_is_in_the_object(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    response = start(stack)
    for number in range(3):
        stack.horde.fault(stack.await_job(name=f"worker {number}")["id"])
    ended = await_end(stack, response)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "generation_failed")


def test_73_what_is_in_the_background_is_stored(stack: FrontStack) -> None:
    assert refuse(stack, background=True, store=False)[:3] == (
        400,
        "conflicting_parameters",
        "store",
    )


def stream_from(stack: FrontStack, response: Body, query: str, **more: Any) -> list[Body]:
    """The events that a reader gets until the end."""
    answer = call(stack, "GET", f"{response['id']}?{query}", **more)
    assert answer.status_code == 200, answer.text
    return read_events(answer.text.splitlines())


def test_74_a_dropped_stream_is_taken_up_again(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack, background=True) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl", "ue")
        stream.await_text("Blue")
        seen = stream.events
    assert [event["type"] for event in seen[:2]] == ["response.created", "response.queued"]
    response = seen[0]["response"]
    reading = stack.threads.submit(
        stream_from, stack, response, f"stream=true&starting_after={len(seen) - 1}"
    )
    whole = stack.threads.submit(stream_from, stack, response, "stream=true")
    post_progress(stack, job["id"], ", or", start=3)
    stack.horde.reply(job["id"], "Blue, or green.")
    rest, everything = reading.result(PATIENCE_SECONDS), whole.result(PATIENCE_SECONDS)
    check_events(everything)
    assert seen + rest == everything
    assert everything[-1]["response"] == await_end(stack, response)
    text = "".join(event.get("delta", "") for event in everything)
    assert text == "Blue, or green."
    number = everything[-1]["sequence_number"]
    assert stream_from(stack, response, f"stream=true&starting_after={number}") == []


def test_74_a_resumed_stream_is_asked_for_properly(stack: FrontStack) -> None:
    response, _ = respond(stack, store=True)
    for query, code, param in (
        ("starting_after=3", "conflicting_parameters", "starting_after"),
        ("stream=true", "invalid_value", "stream"),
        ("stream=maybe", "invalid_value", "stream"),
        ("stream=true&starting_after=x", "invalid_value", "starting_after"),
        ("include=nonsense", "unsupported_value", "include[0]"),
    ):
        answer = call(stack, "GET", f"{response['id']}?{query}")
        assert get_code(answer) == (400, code)
        assert get_error(answer)["param"] == param


def test_75_a_response_is_cancelled(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    response = start(stack)
    stack.await_job()
    cancelled = call(stack, "POST", f"{response['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    (native_id,) = list_request_ids()
    assert is_cancelled(native_id)
    assert call(stack, "POST", f"{response['id']}/cancel").json() == cancelled
    assert get(stack, response).json() == cancelled
    waited_for, _ = respond(stack, store=True)
    assert get_code(call(stack, "POST", f"{waited_for['id']}/cancel")) == (400, "invalid_value")


def test_75_a_cancelled_stream_ends(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack, background=True) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl")
        stream.await_text("Bl")
        id_ = stream.events[0]["response"]["id"]
        assert call(stack, "POST", f"{id_}/cancel").status_code == 200
        stream.finish()
        assert stream.kinds[-1] == "response.failed"
        assert stream.response["status"] == "cancelled"
        assert stream.response["output"][0]["content"][0]["text"] == "Bl"


def test_a_running_response_is_deleted_with_its_request(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    response = start(stack)
    stack.await_job()
    assert call(stack, "DELETE", response["id"]).status_code == 200
    (native_id,) = list_request_ids()
    assert is_cancelled(native_id)
    assert get(stack, response).status_code == 404


@pytest.mark.parametrize("is_streamed", [False, True])
def test_76_another_process_goes_on(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """The first front ends and gives its lease back."""
    stack.horde.take_nothing()
    with run_front(stack.config) as url:
        if is_streamed:
            with ResponseStream(stack, url=url, background=True) as stream:
                job = stack.await_job()
                post_progress(stack, job["id"], "Bl")
                stream.await_text("Bl")
                seen = stream.events
            response = seen[0]["response"]
        else:
            response, seen = start(stack, url=url), []
            job = stack.await_job()
    assert get(stack, response).status_code == 200
    stack.horde.reply(job["id"], "Blue.")
    ended = await_end(stack, response)
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "Blue."
    if is_streamed:
        everything = stream_from(stack, response, "stream=true")
        check_events(everything)
        assert everything[: len(seen)] == seen


def test_76_a_killed_process_loses_its_lease(stack: FrontStack, redis: OwnRedis) -> None:
    stack.horde.take_nothing()
    response = start(stack)
    job = stack.await_job()
    # As if the process had died half a minute ago; the one that lives notices that it lost.
    (lease,) = run(redis, "KEYS", "*lease*")
    run(redis, "DEL", lease)
    with run_front(stack.config) as url:
        get(stack, response, url=url)
        stack.horde.reply(job["id"], "Blue.")
        assert await_end(stack, response, url=url)["status"] == "completed"


def test_the_sdk_works_in_the_background(stack: FrontStack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key) as client:
        stack.horde.take_nothing()
        created = client.responses.create(
            model=MODEL, input="hi", max_output_tokens=64, background=True
        )
        job = stack.await_job()
        assert client.responses.retrieve(created.id).status in ("queued", "in_progress")
        stack.horde.reply(job["id"])
        wait_until(lambda: client.responses.retrieve(created.id).status == "completed")
        assert client.responses.retrieve(created.id).output_text == "Blue."
        items = client.responses.input_items.list(created.id)
        assert [item.type for item in items] == ["message"]
        client.responses.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(created.id)


def test_77_nothing_of_a_stored_response_is_logged(
    stack: FrontStack, caplog: pytest.LogCaptureFixture
) -> None:
    mark = "Zwetschgenknoedel"
    response, _ = respond(stack, mark, store=True, input=mark, metadata={"a": mark})
    get(stack, response)
    refuse(stack, previous_response_id=mark)
    logged = json.dumps([str(record.__dict__) for record in caplog.records])
    assert mark not in logged
    assert stack.horde.requester_key not in logged
    assert store_module.PREFIX not in logged
