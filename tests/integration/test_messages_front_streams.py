# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages that are streamed, with Redis and a worker that posts its progress. Numbers are those of
the form's checklist.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from devtools.services import ServiceAddresses
from horde.setting_kinds import build_redis_url
from tests.integration._fake_chat_worker import MODEL, Body, build_call, start_anew
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, run_front_stack, wait_until
from tests.integration.messages_front import (
    PATH,
    TOOL,
    USAGE_KEYS,
    ask,
    await_job,
    build_message,
    complete,
    join_events,
    post,
    read_error,
    read_events,
)

TOOLS_DECLARED: Body = {"chat_features": ["prompt_overflow_refused", "tools"]}
THINKING: Body = {"type": "adaptive"}
RELAY_SECONDS = 0.5  # what was posted is with the client by then


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    url = build_redis_url(service_urls.redis_url, 7)
    with run_front_stack(
        service_urls,
        "messages_streams",
        redis_url=url,
        stream_open_seconds=0.2,
        messages_ping_seconds=0.3,
        keepalive_seconds=30.0,
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def stream_message(
    stack: FrontStack,
    content: str | None = "Blue.",
    *,
    posts: tuple[tuple[str | None, str | None], ...] = (),
    pop: Body | None = None,
    reply: Body | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """The events of a message whose worker posts (content, reasoning) pieces and then replies."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = ask(stack, stream=True, **changes)
    job = await_job(stack, waiting, **(pop or {}))
    for number, (text, reasoning) in enumerate(posts, 1):
        answer = stack.horde.post_progress(job["id"], number, text, reasoning=reasoning)
        assert answer.status_code == 200, answer.json
    answer = stack.horde.reply(job["id"], content, **(reply or {}))
    assert answer.status_code == 200, answer.json
    streamed = waiting.result(PATIENCE_SECONDS)
    assert streamed.status_code == 200, streamed.text
    return read_events(streamed)


def name_events(events: list[dict[str, Any]]) -> list[str]:
    """Types without pings, those of deltas by what they carry."""
    return [
        event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        for event in events
        if event["type"] != "ping"
    ]


def test_69_and_70_events_come_in_their_order(stack: FrontStack) -> None:
    events = stream_message(stack, posts=(("Bl", None), ("ue", None)))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    names = name_events(events)
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"text_delta"}
    start = events[0]["message"]
    assert start["content"] == []
    assert (start["stop_reason"], start["stop_sequence"], start["model"]) == (None, None, MODEL)
    assert "x_horde" not in start
    assert set(start["usage"]) == USAGE_KEYS
    assert start["usage"]["output_tokens"] == 0
    assert join_events(events)["content"] == [{"type": "text", "text": "Blue."}]


def test_70_and_71_and_72_thoughts_text_and_calls_are_blocks_of_their_own(
    stack: FrontStack,
) -> None:
    calls = [build_call(), build_call(call_id="call_2", arguments="")]
    events = stream_message(
        stack,
        "Let me see.",
        posts=((None, "Hm, "), (None, "rain?"), ("Let me", None)),
        pop=TOOLS_DECLARED,
        reply={
            "reasoning_content": "Hm, rain?",
            "tool_calls": calls,
            "finish_reason": "tool_calls",
        },
        tools=[TOOL],
        thinking=THINKING,
    )
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert [event["content_block"]["type"] for event in starts] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["content_block"]["input"] == {}
    names = name_events(events)
    place = names.index("signature_delta")
    assert names.count("signature_delta") == 1
    assert names[place + 1 : place + 3] == ["content_block_stop", "content_block_start"]
    inputs = [
        event["delta"]["partial_json"]
        for event in events
        if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert inputs == ['{"city":"Oslo"}', "{}"]
    message = join_events(events)
    assert message["content"][0]["thinking"] == "Hm, rain?"
    assert message["content"][0]["signature"].startswith("aihorde-")
    assert message["content"][1]["text"] == "Let me see."
    assert message["stop_reason"] == "tool_use"


def test_73_the_end_says_why_and_how_much(stack: FrontStack) -> None:
    counts = {"prompt_tokens": 21, "completion_tokens": 3}
    events = stream_message(stack, reply=counts, stop_sequences=["Blue."])
    end = events[-2]
    assert end["type"] == "message_delta"
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Blue."}
    assert end["usage"] == {
        "input_tokens": 21,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 3,
    }
    assert end["x_horde"]["model"] == MODEL


def test_73_a_withheld_reply_says_so(stack: FrontStack) -> None:
    end = stream_message(stack, reply={"finish_reason": "content_filter"})[-2]
    assert end["delta"]["stop_reason"] == "refusal"
    assert end["delta"]["stop_details"]["type"] == "refusal"


def test_65_an_empty_reply_is_one_empty_block(stack: FrontStack) -> None:
    names = name_events(stream_message(stack, ""))
    assert names == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_26_and_71_thoughts_are_shown_to_those_who_ask(stack: FrontStack) -> None:
    posts = ((None, "Hm."), ("Blue.", None))
    events = stream_message(stack, posts=posts, reply={"reasoning_content": "Hm."})
    assert [block["type"] for block in join_events(events)["content"]] == ["text"]


def test_71_thoughts_behind_text_are_left_out(stack: FrontStack) -> None:
    events = stream_message(
        stack,
        posts=(("Bl", None), (None, "late")),
        reply={"reasoning_content": "late"},
        thinking=THINKING,
    )
    message = join_events(events)
    assert message["content"][-1] == {"type": "text", "text": "Blue."}
    assert name_events(events).count("content_block_start") == len(message["content"])


def test_74_silence_is_filled_with_pings(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = ask(stack, stream=True)
    job = await_job(stack, waiting)
    time.sleep(1.2)  # several times the interval
    stack.horde.reply(job["id"])
    events = read_events(waiting.result(PATIENCE_SECONDS))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds.count("ping") >= 3
    assert ":" not in {line[:1] for line in waiting.result().text.splitlines()}


def test_75_the_sdk_s_stream_gives_the_plain_message(stack: FrontStack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.horde.requester_key)
    reply = {
        "reasoning_content": "Hm.",
        "tool_calls": [build_call()],
        "finish_reason": "tool_calls",
        "prompt_tokens": 21,
        "completion_tokens": 3,
    }
    changes: Body = {"tools": [TOOL], "thinking": THINKING}

    def stream() -> Any:
        with client.messages.stream(**build_message(**changes)) as opened:
            return opened.get_final_message()

    stack.horde.take_nothing(**TOOLS_DECLARED)
    waiting = stack.threads.submit(stream)
    job = stack.await_job(**TOOLS_DECLARED)
    stack.horde.post_progress(job["id"], 1, None, reasoning="Hm.")
    stack.horde.post_progress(job["id"], 2, "Look")
    stack.horde.reply(job["id"], "Looking.", **reply)
    streamed = waiting.result(PATIENCE_SECONDS).to_dict()
    plain = complete(stack, "Looking.", pop=TOOLS_DECLARED, reply=reply, **changes)
    for message in (streamed, plain):
        message.pop("x_horde", None)
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
    assert {key: value for key, value in streamed.items() if value is not None} == {
        key: value for key, value in plain.items() if value is not None
    }


def test_76_a_failure_in_an_open_stream_is_its_last_event(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = ask(stack, stream=True)
    job = await_job(stack, waiting)
    stack.horde.post_progress(job["id"], 1, "Bl")
    time.sleep(RELAY_SECONDS)
    stack.horde.reply(job["id"], "Red.")
    events = read_events(waiting.result(PATIENCE_SECONDS))
    assert name_events(events)[:3] == ["message_start", "content_block_start", "text_delta"]
    assert name_events(events)[-1] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["error"]["details"]["error_code"] == "stream_diverged"
    assert events[-1]["request_id"] == waiting.result().headers["request-id"]
    assert not {"message_delta", "message_stop", "content_block_stop"} & set(name_events(events))


def test_76_the_sdk_raises_it(stack: FrontStack) -> None:
    client = anthropic.Anthropic(
        base_url=stack.url, api_key=stack.horde.requester_key, max_retries=0
    )

    def stream() -> None:
        with client.messages.stream(**build_message()) as opened:
            opened.get_final_message()

    stack.horde.take_nothing()
    waiting = stack.threads.submit(stream)
    for _ in range(3):
        job = stack.await_job()
        stack.horde.post_progress(job["id"], 1, "Bl")
        time.sleep(RELAY_SECONDS)
        stack.horde.fault(job["id"])
    with pytest.raises(anthropic.APIStatusError) as raised:
        waiting.result(PATIENCE_SECONDS)
    assert raised.value.body["error"]["type"] == "api_error"


def test_77_what_is_refused_at_once_is_no_stream(stack: FrontStack) -> None:
    answer = post(stack, stream=True, model="nobody/has-it")
    assert (answer.status_code, read_error(answer)["type"]) == (404, "not_found_error")


def test_78_hanging_up_cancels(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    headers = {"x-api-key": stack.horde.requester_key}
    body = json.dumps(build_message(stream=True))
    with stack.client.stream("POST", PATH, content=body, headers=headers) as opened:
        job = stack.await_job()
        stack.horde.post_progress(job["id"], 1, "Bl")
        next(opened.iter_lines())
        request_id = opened.headers["x-horde-request-id"]
    wait_until(lambda: stack.horde.status(request_id).get("done"))
