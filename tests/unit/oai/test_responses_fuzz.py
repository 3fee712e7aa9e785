# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever a body holds, it is read or refused: nothing else is raised, and what is read is a chat
request that the native API can judge.
"""

import json
from random import Random

import pytest

from horde.chat.tools import parse_tools
from horde.exceptions import BadRequest
from horde.json_body import parse_json_body
from horde.oai.bodies import write_native_body
from horde.oai.errors import ErrorAnswer, RequestRefused
from horde.oai.responses_form.answer import ResponseHead, build_response
from horde.oai.responses_form.records import name_items
from horde.oai.responses_form.request import ResponsesRequest
from tests.fuzz import Attacker
from tests.integration._fuzz_responses import FULL_RESPONSE

SEED = 8
BODY_COUNT = 300
LONGEST_REFUSAL_CHARACTERS = 5000


def judge(data: bytes) -> bool:
    """Whether a body is read."""
    try:
        value = parse_json_body(data, keeps_number_forms=True)
    except BadRequest:
        return False
    try:
        request = ResponsesRequest.parse(value, 4096)
    except RequestRefused as refused:
        answer = ErrorAnswer(
            status=400, code=refused.code, message=refused.message, param=refused.param
        )
        assert len(json.dumps(answer.build_body())) < LONGEST_REFUSAL_CHARACTERS
        return False
    json.dumps(build_response(ResponseHead.of(request, "1-1", 1), "queued"))
    json.dumps(name_items(request.input.raw, "1-1"))
    native = json.loads(write_native_body(request.native_body))
    assert request.needs_items or native["messages"]  # images are judged by the native API
    parse_tools(native.get("tools"))
    return True


def test_no_mutated_body_does_harm() -> None:
    attacker = Attacker(Random(SEED), ())
    read = sum(judge(attacker.draw_body(FULL_RESPONSE)) for _ in range(BODY_COUNT))
    assert BODY_COUNT / 50 < read < BODY_COUNT


@pytest.mark.parametrize("depth", [100, 500])
def test_a_deep_schema_is_refused_at_its_place(depth: int) -> None:
    nested = '{"items":' * depth + "{}" + "}" * depth
    body = (
        '{"model":"a","input":"a","tools":[{"type":"function","name":"b","parameters":'
        '{"type":"object","properties":{"c":%s}}}]}'
    )
    assert not judge((body % nested).encode())
