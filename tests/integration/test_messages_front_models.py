# SPDX-License-Identifier: AGPL-3.0-or-later
"""Names of models, their list, and counts of tokens. Numbers are those of the form's checklist."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.model_map import ModelMap
from tests.integration._fake_chat_worker import MODEL, Body, start_anew
from tests.integration.chat_front import FrontStack, run_front_stack, wait_until
from tests.integration.messages_front import (
    IMAGE,
    TOOL,
    VERSION,
    build_message,
    complete,
    get_payload,
    post,
    read_error,
    refuse,
    serve,
)
from tests.integration.test_messages_front_streams import stream_message
from tests.integration.text_horde import count_rows

SECOND = "test/a-second-model"
TABLE = ModelMap(
    (
        ("claude-haiku-4-5", (SECOND, MODEL)),
        ("claude-opus-*", ("elinas/chronos-70b-v2", MODEL)),
        ("claude-offline", ("nobody/has-it",)),
        ("test/*", (SECOND,)),
        ("claude-*", (MODEL,)),
    )
)
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls, "messages_models", models_cache_seconds=0.0, model_map=TABLE
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def test_57_a_name_of_the_table_is_served_and_echoed(stack: FrontStack) -> None:
    answer, _ = serve(stack, model="claude-sonnet-4-5-20250929")
    message = answer.json()
    assert message["model"] == "claude-sonnet-4-5-20250929"
    assert message["x_horde"]["model"] == answer.headers["x-horde-model"] == MODEL


def test_57_the_first_entry_that_matches_counts_and_lists_are_alternatives(
    stack: FrontStack,
) -> None:
    assert complete(stack, model="claude-opus-5")["x_horde"]["model"] == MODEL


def test_57_what_is_served_under_its_own_name_is_mapped_by_that_name_alone(
    stack: FrontStack,
) -> None:
    assert complete(stack, model=MODEL)["x_horde"]["model"] == MODEL


def test_58_a_name_that_nobody_knows(stack: FrontStack) -> None:
    refused = (404, "not_found_error", "model: Claude-sonnet-4")  # the case counts
    assert refuse(stack, model="Claude-sonnet-4") == refused
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.horde.requester_key)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**build_message(model="gpt-4o"))


# --- counts
# -------------------------------------------------------------------------------------------------


def count(stack: FrontStack, **changes: Any) -> int:
    answer = post(stack, path=COUNT, **changes)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"input_tokens"}
    return int(answer.json()["input_tokens"])


def test_59_a_count_is_that_of_the_message_and_queues_nothing(stack: FrontStack) -> None:
    changes: Body = {"system": "Be brief.", "tools": [TOOL]}
    counted = count(stack, max_tokens=..., **changes)
    assert counted > 20
    assert count_rows(WaitingPrompt) == 0
    ignored = {"max_tokens": -1, "stream": "a", "temperature": 9, "top_p": 9, "top_k": 9}
    assert count(stack, **changes, **ignored) == counted
    declared: Body = {"chat_features": ["prompt_overflow_refused", "tools"]}
    events = stream_message(stack, pop=declared, **changes)
    assert events[0]["message"]["usage"]["input_tokens"] == counted


def test_59_a_count_needs_a_key_and_a_body(stack: FrontStack) -> None:
    assert post(stack, path=COUNT, headers={}).status_code == 401
    assert post(stack, path=COUNT, messages=[]).status_code == 400
    assert post(stack, path=COUNT, seed=1).status_code == 400
    assert stack.call("GET", COUNT).status_code == 405
    assert post(stack, path=COUNT, headers={"x-api-key": "of-nobody"}).status_code == 200


def test_59_what_runs_elsewhere_is_counted_by_its_size(stack: FrontStack) -> None:
    plain = count(stack)
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert count(stack, tools=[search]) == plain + -(-len(json.dumps(search)) // 4)
    source = {"type": "base64", "media_type": "application/pdf", "data": "a" * 4000}
    document = [
        {"type": "text", "text": "Name one colour."},
        {"type": "document", "source": source},
    ]
    assert count(stack, messages=[{"role": "user", "content": document}]) > plain + 1000
    used = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {"a": "b" * 400}}
    messages = [{"role": "assistant", "content": [used]}, {"role": "user", "content": "a"}]
    assert count(stack, messages=messages) > 100


# --- the list
# -----------------------------------------------------------------------------------------------


def come_online(stack: FrontStack, *names: str) -> None:
    """Workers of these models, in the list: the API remembers it for a moment."""
    for name in names:
        stack.horde.take_nothing(name=f"worker of {name}", model=name)
    wait_until(lambda: len(stack.call("GET", "/v1/models").json()["data"]) == len(names))


def list_models(stack: FrontStack, query: str = "", **headers: str) -> httpx.Response:
    return stack.call("GET", f"/v1/models{query}", headers={**VERSION, **headers})


def test_60_the_list_has_the_form_of_who_asks(stack: FrontStack) -> None:
    empty = list_models(stack).json()
    assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    come_online(stack, MODEL)
    listed = list_models(stack).json()
    assert set(listed) == {"data", "has_more", "first_id", "last_id"}
    entry = next(entry for entry in listed["data"] if entry["id"] == MODEL)
    assert entry.pop("created_at").endswith("Z")
    assert entry == {
        "type": "model",
        "id": MODEL,
        "display_name": MODEL,
        "lifecycle": "active",
        "max_input_tokens": 8192,
        "max_tokens": 1024,
    }
    other = stack.call("GET", "/v1/models", headers={"x-api-key": "a"}).json()
    assert other["object"] == "list"
    assert [card["id"] for card in other["data"]] == [MODEL]


def test_61_pages(stack: FrontStack) -> None:
    come_online(stack, MODEL, SECOND)
    whole = [entry["id"] for entry in list_models(stack, "?limit=1000").json()["data"]]
    assert whole == sorted(whole)
    assert set(whole) == {MODEL, SECOND, "claude-haiku-4-5"}
    seen: list[str] = []
    query = "?limit=1"
    for _ in whole:
        page = list_models(stack, query).json()
        [entry] = page["data"]
        seen.append(entry["id"])
        assert page["first_id"] == page["last_id"] == entry["id"]
        assert page["has_more"] is (len(seen) < len(whole))
        query = f"?limit=1&after_id={entry['id']}"
    assert seen == whole
    before = list_models(stack, f"?limit=1&before_id={whole[2]}").json()
    assert ([entry["id"] for entry in before["data"]], before["has_more"]) == ([whole[1]], True)
    client = anthropic.Anthropic(base_url=stack.url, api_key="any")
    assert [model.id for model in client.models.list(limit=1)] == whole


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=a", "limit=-1", "after_id=none", "after_id=a&before_id=b"],
)
def test_61_a_wrong_query_is_refused(stack: FrontStack, query: str) -> None:
    answer = list_models(stack, f"?{query}")
    assert (answer.status_code, read_error(answer)["type"]) == (400, "invalid_request_error")
    assert list_models(stack, "?beta=true&x=1").status_code == 200


def test_62_an_alias_is_listed_while_its_target_is_online(stack: FrontStack) -> None:
    assert list_models(stack, "/claude-haiku-4-5").status_code == 404
    come_online(stack, MODEL)
    entry = list_models(stack, "/claude-haiku-4-5").json()
    assert entry["display_name"] == f"claude-haiku-4-5 ({MODEL})"
    assert entry["max_input_tokens"] == 8192
    assert entry in list_models(stack).json()["data"]
    assert list_models(stack, "/claude-sonnet-9").json()["id"] == "claude-sonnet-9"
    assert list_models(stack, f"/{MODEL}").json()["display_name"] == MODEL
    for unknown in ("nobody", "claude-offline"):
        answer = list_models(stack, f"/{unknown}")
        error = read_error(answer)
        assert (answer.status_code, error["type"]) == (404, "not_found_error")
        assert error["message"] == f"model: {unknown}"


def test_a_hint_follows_the_name_to_its_target(stack: FrontStack) -> None:
    declared: Body = {"chat_features": ["prompt_overflow_refused", "reasoning_effort"]}
    payload = get_payload(
        stack, pop=declared, model="claude-sonnet-5", output_config={"effort": "low"}
    )
    assert payload["reasoning_effort"] == "low"


def test_an_image_is_counted(stack: FrontStack) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    content = [{"type": "image", "source": source}]
    assert count(stack, messages=[{"role": "user", "content": content}]) > 512
