# SPDX-License-Identifier: AGPL-3.0-or-later
"""One reader of messages for API and front: what either refuses, and what the front alone leaves
out.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horde.chat.messages import EXACT, build_stored_messages, parse_messages
from horde.chat_contract import ChatRequestRefused, RefusalKind
from horde.oai.leniency import ECHOED_MESSAGES

CALL: dict[str, Any] = {
    "id": "a",
    "type": "function",
    "function": {"name": "lookup", "arguments": "{}"},
}
ANSWER: dict[str, Any] = {"role": "tool", "tool_call_id": "a", "content": "x"}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://a/b", "detail": "low"}}
PLAIN: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief.", "name": "me"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]},
    {"role": "assistant", "tool_calls": [CALL]},
    ANSWER,
    {"role": "assistant", "content": "Blue."},
]


def build_image(**members: object) -> dict[str, Any]:
    part = IMAGE | {"image_url": IMAGE["image_url"] | members}
    return {"role": "user", "content": [part]}


def build_calls(call: dict[str, Any], **members: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [call], **members}, ANSWER]


@pytest.mark.parametrize("leniency", [EXACT, ECHOED_MESSAGES])
def test_what_asks_for_nothing_more_is_read_alike(leniency: Any) -> None:
    assert parse_messages(PLAIN, leniency) == PLAIN


def test_what_is_stored_says_system_and_has_a_content() -> None:
    stored = build_stored_messages(parse_messages(PLAIN))
    assert [message["role"] for message in stored] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    assert stored[2] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert PLAIN[0]["role"] == "developer"


ECHOED: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "a", extra: None}], [{"role": "user", "content": "a"}])
    for extra in ("refusal", "audio", "tool_calls", "anything")
]
ECHOED += [
    ([PLAIN[4] | extra], [PLAIN[4]])
    for extra in (
        {"reasoning_content": "hm"},
        {"reasoning": {"a": 1}},
        {"reasoning_details": [1]},
        {"parsed": {}},
        {"annotations": []},
        {"tool_calls": []},
        {"cache_control": {"type": "ephemeral"}},
    )
]
ECHOED += [
    (build_calls(CALL | {"index": 0}), build_calls(CALL)),
    (build_calls(CALL | {"cache_control": 1}), build_calls(CALL)),
    (
        build_calls(CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}),
        build_calls(CALL),
    ),
    (build_calls(CALL, content=[]), build_calls(CALL)),
    ([build_image(format="image/png")], [build_image()]),
    ([build_image(cache_control=1)], [build_image()]),
    ([{"role": "assistant", "tool_calls": [CALL]}, ANSWER | {"name": "f"}], build_calls(CALL)),
]


@pytest.mark.parametrize(("sent", "read"), ECHOED)
def test_the_front_leaves_out_what_the_api_refuses(
    sent: list[dict[str, Any]], read: list[dict[str, Any]]
) -> None:
    assert parse_messages(sent, ECHOED_MESSAGES) == read
    with pytest.raises(ChatRequestRefused):
        parse_messages(sent)


@pytest.mark.parametrize("leniency", [EXACT, ECHOED_MESSAGES])
@pytest.mark.parametrize(
    ("messages", "path", "kind"),
    [
        ({}, "messages", RefusalKind.TYPE),
        ([], "messages", RefusalKind.VALUE),
        ([PLAIN[1]] * 1025, "messages", RefusalKind.LIMIT),
        (["hi"], "messages[0]", RefusalKind.TYPE),
        ([{"content": "hi"}], "messages[0].role", RefusalKind.MISSING),
        ([{"role": 5}], "messages[0].role", RefusalKind.TYPE),
        ([{"role": "function"}], "messages[0].role=function", RefusalKind.UNSUPPORTED),
        ([{"role": "user"}], "messages[0].content", RefusalKind.MISSING),
        ([{"role": "user", "content": 5}], "messages[0].content", RefusalKind.TYPE),
        ([{"role": "user", "content": []}], "messages[0].content", RefusalKind.VALUE),
        (
            [{"role": "user", "content": "a", "tool_calls": []}],
            "messages[0].tool_calls",
            RefusalKind.UNSUPPORTED,
        ),
        (
            [{"role": "assistant", "content": "a", "refusal": "no"}],
            "messages[0].refusal",
            RefusalKind.UNSUPPORTED,
        ),
        (
            [{"role": "tool", "content": "a"}],
            "messages[0].tool_call_id",
            RefusalKind.MISSING,
        ),
        (
            [{"role": "assistant", "content": [IMAGE]}],
            "messages[0].content[0].type=image_url",
            RefusalKind.UNSUPPORTED,
        ),
        ([PLAIN[1], ANSWER], "messages[1].role", RefusalKind.HISTORY),
    ],
)
def test_both_refuse_with_one_path_and_kind(
    messages: object, path: str, kind: RefusalKind, leniency: Any
) -> None:
    with pytest.raises(ChatRequestRefused) as raised:
        parse_messages(messages, leniency)
    assert (raised.value.path, raised.value.kind) == (path, kind)


_VALUES = st.none() | st.text(max_size=4) | st.integers() | st.lists(st.just("a"), max_size=1)
_PARTS = st.dictionaries(
    st.sampled_from(["type", "text", "image_url", "cache_control"]),
    st.sampled_from(["text", "image_url"]) | _VALUES,
    max_size=3,
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": _VALUES | st.lists(_PARTS, max_size=2),
        "name": _VALUES,
        "refusal": _VALUES,
        "annotations": _VALUES,
        "tool_calls": st.just([CALL]) | _VALUES,
        "tool_call_id": st.just("a") | _VALUES,
    },
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_MESSAGES, max_size=3))
def test_what_the_api_takes_the_front_passes_on_unchanged(messages: list[Any]) -> None:
    try:
        read = parse_messages(messages)
    except ChatRequestRefused:
        try:
            read = parse_messages(messages, ECHOED_MESSAGES)
        except ChatRequestRefused:
            return
        # What the front let through is a request that the API takes.
        assert parse_messages(read) == read
        return
    assert parse_messages(messages, ECHOED_MESSAGES) == read
