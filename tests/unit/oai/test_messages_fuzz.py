# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever a body holds, it is read or refused: nothing else is raised, and what is read is a chat
request that the native API can judge.
"""

import contextlib
import json
from random import Random

import pytest

from horde.chat.messages import parse_messages
from horde.chat.tools import parse_tools
from horde.chat_contract import ChatContextFit
from horde.exceptions import BadRequest
from horde.json_body import parse_json_body
from horde.oai.anthropic.errors import build_error_body
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.bodies import write_native_body
from horde.oai.errors import ErrorAnswer, RequestRefused
from tests.fuzz import Attacker
from tests.integration._fuzz_messages import FULL_MESSAGE

SEED = 7
BODY_COUNT = 300
LONGEST_REFUSAL_CHARACTERS = 5000


def judge(data: bytes) -> bool:
    """Whether a body is read."""
    try:
        value = parse_json_body(data, keeps_number_forms=True)
    except BadRequest:
        return False
    with contextlib.suppress(RequestRefused):
        MessagesRequest.parse_for_estimate(value)
    try:
        request = MessagesRequest.parse(value, ChatContextFit.GROW)
    except RequestRefused as refused:
        answer = ErrorAnswer(
            status=400, code=refused.code, message=refused.message, param=refused.param
        )
        body = json.dumps(build_error_body(answer, "req_1"))
        assert len(body) < LONGEST_REFUSAL_CHARACTERS
        return False
    native = json.loads(write_native_body(request.native_body))
    parse_messages(native["messages"])
    parse_tools(native.get("tools"))
    return True


def test_no_mutated_body_does_harm() -> None:
    attacker = Attacker(Random(SEED), ())
    read = sum(judge(attacker.draw_body(FULL_MESSAGE)) for _ in range(BODY_COUNT))
    assert BODY_COUNT / 50 < read < BODY_COUNT


@pytest.mark.parametrize("depth", [100, 500])
def test_a_deep_input_of_a_call_is_read_or_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    body = (
        '{"model":"a","max_tokens":16,"messages":[{"role":"user","content":"a"},'
        '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":{"c":%s}}]},'
        '{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}]}'
    )
    assert judge((body % nested).encode())
