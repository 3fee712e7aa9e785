# SPDX-License-Identifier: AGPL-3.0-or-later
"""The submit of a chat request, for every form: its operation key, and the length of a reply whose
client did not choose one.

Source: docs/reference/chat_front.md, "The life of a completion".
"""

from typing import Final, cast
from uuid import uuid4

from horde_sdk.generation_parameters.text.chat_limits import MIN_CHAT_MAX_TOKENS

from horde.chat_contract import ChatAvailabilityMode
from horde.json_text import JsonObject
from horde.oai.bodies import write_native_body
from horde.oai.callers import choose_operation_key
from horde.oai.calls import Calls, OpenCall, finish_even_if_cancelled
from horde.oai.forms import ChatFormRequest
from horde.oai.mapping import CompletedReply, parse_completed_reply
from horde.oai.native import CHAT, Caller, Submitted
from horde.oai.waiting import RequestWait

# What a second submit changes; the rest of a body may be megabytes and is written once.
_CHANGING_KEYS: Final = ("horde", "max_tokens")

type _Queued = tuple[Submitted, RequestWait[CompletedReply] | None]


async def submit_chat(
    calls: Calls, call: OpenCall, request: ChatFormRequest, caller: Caller
) -> _Queued:
    """Queue a request; the wait for it, None for a dry run. Raises FrontFailure.

    Where the length is open and no online worker is fast enough for it, the request is queued anew
    with the longest that one is fast enough for. One that its client may repeat by an operation key
    is not: the key stands for what was queued first.
    """
    key = choose_operation_key(request.horde.operation_key, call.request_headers)
    call.is_resumable |= key.is_from_client
    call.phase = "submit"
    may_shorten = request.is_length_open and not key.is_from_client
    body = request.native_body
    head: JsonObject = {name: body.pop(name) for name in _CHANGING_KEYS if name in body}
    options = cast(JsonObject, head.get("horde", {}))
    head["horde"] = options | {"operation_key": str(key.value)}
    rest = await calls.bodies.work(call.body_bytes, lambda: write_native_body(body))

    async def submit() -> _Queued:
        return await calls.submit(
            call,
            _write_body(head, rest),
            caller,
            CHAT,
            parse_completed_reply,
            is_fail_fast=request.horde.availability_mode is ChatAvailabilityMode.FAIL_FAST,
        )

    submitted, wait = await submit()
    # The API says so when no online worker can take a request as it is.
    if wait is None or not may_shorten or "message" not in submitted.body:
        return submitted, wait
    longest = await _find_longest(calls, call, caller, wait)
    if longest is None or longest < MIN_CHAT_MAX_TOKENS:
        return submitted, wait
    if not await finish_even_if_cancelled(wait.withdraw()):
        return submitted, wait
    call.waits.remove(wait)
    head["max_tokens"] = longest
    head["horde"] = options | {"operation_key": str(uuid4())}
    return await submit()


async def _find_longest(
    calls: Calls, call: OpenCall, caller: Caller, wait: RequestWait[CompletedReply]
) -> int | None:
    """The tokens that a worker is fast enough for, while its speed alone keeps it from the request.
    Raises WaitFailed.
    """
    look = calls.build_wait(caller, wait.request_id, call.deadline, parse_completed_reply)
    if await look.read_status() is not None:
        return None
    return look.largest_max_length


def _write_body(head: JsonObject, rest: bytes) -> bytes:
    """One object of both; `rest` is an object that is not empty, since it holds the messages."""
    return write_native_body(dict(head))[:-1] + b"," + rest[1:]
