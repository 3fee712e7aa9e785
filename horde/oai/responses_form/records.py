# SPDX-License-Identifier: AGPL-3.0-or-later
"""A stored response as a plain value, and as the text that Redis keeps.

Source: docs/reference/front_responses.md, "Stored responses".
"""

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from horde.json_text import JsonObject
from horde.oai.responses_form.answer import RESPONSE_ID_PREFIX, ResponseHead
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.tools import NO_TOOLS, parse_tools

RUNNING: Final = frozenset({"queued", "in_progress"})
_RESPONSE_ID: Final = re.compile(rf"{RESPONSE_ID_PREFIX}([0-9A-Za-z-]{{1,64}})")
_ITEM_ID: Final = re.compile(
    r"[a-z]{1,8}_([0-9a-f]{8})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{12})_i?\d{1,5}"
)
_ITEM_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "reasoning": "rs",
}


def find_request_id(response_id: str) -> str | None:
    """The native id in the id of a response; None where it is none."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return found.group(1) if found else None


def find_request_id_of_item(item_id: str) -> str | None:
    """The native id in the id of an item; None where it is not one of ours."""
    found = _ITEM_ID.fullmatch(item_id)
    return "-".join(found.groups()) if found else None


def build_owner(secret: str, api_key: str) -> str:
    """Who a key belongs to, as a record says it: the key cannot be told from it."""
    return hmac.new(
        secret.encode(), api_key.encode("latin-1", "replace"), hashlib.sha256
    ).hexdigest()


@dataclass(slots=True, kw_only=True)
class Record:
    """One stored response. `created` and `deadline` are in Unix seconds.

    `links` are the native ids of the responses before it, oldest first. `response` is the object as
    it was last written. `is_streamed`: its events are kept as well.
    """

    request_id: str
    owner: str
    created: int
    deadline: float
    is_streamed: bool
    input: list[JsonObject]
    links: list[str]
    estimated_prompt_tokens: int
    include_reasoning: bool
    requested_model: str | None
    response: JsonObject

    @property
    def status(self) -> str:
        """Where the response stands."""
        return str(self.response["status"])

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.status in RUNNING

    @property
    def is_background(self) -> bool:
        """Whether nobody has to wait for it."""
        return bool(self.response["background"])

    @classmethod
    def of(
        cls,
        request: ResponsesRequest,
        head: ResponseHead,
        response: JsonObject,
        owner: str,
        deadline: float,
    ) -> Self:
        """The record of a response that the horde took."""
        return cls(
            request_id=head.request_id,
            owner=owner,
            created=head.created,
            deadline=deadline,
            is_streamed=request.background and request.stream,
            input=name_items(request.stored_items, head.request_id),
            links=list(request.links),
            estimated_prompt_tokens=head.estimated_prompt_tokens,
            include_reasoning=head.include_reasoning,
            requested_model=request.model,
            response=response,
        )

    def build_head(self) -> ResponseHead:
        """The head of its answer, for who takes it over."""
        tools = self.response["tools"]
        tool_set = parse_tools(tools) if tools else NO_TOOLS
        names = ("id", "created_at", "model", "status", "output", "background", "store")
        return ResponseHead(
            request_id=self.request_id,
            created=self.created,
            model=str(self.response["model"]),
            echo={key: value for key, value in self.response.items() if key not in names},
            tools=tool_set,
            not_enforced=tuple(tool_set.list_not_enforced()),
            estimated_prompt_tokens=self.estimated_prompt_tokens,
            include_reasoning=self.include_reasoning,
            store=True,
            background=self.is_background,
        )

    def write_fixed(self) -> bytes:
        """What never changes, as text."""
        names = [field.name for field in fields(self) if field.name != "response"]
        return write_json({name: getattr(self, name) for name in names})

    @classmethod
    def read(cls, fixed: bytes, response: bytes) -> Self:
        """The record of two texts."""
        return cls(**json.loads(fixed), response=json.loads(response))


def write_json(value: object) -> bytes:
    """Compact JSON; half of a surrogate pair is escaped."""
    return json.dumps(value, separators=(",", ":")).encode()


def name_items(items: Sequence[JsonObject], request_id: str) -> list[JsonObject]:
    """Items of an input as they are listed: each with an id and a type, its text in parts."""
    return [_name_item(item, request_id, index) for index, item in enumerate(items)]


def _name_item(item: JsonObject, request_id: str, index: int) -> JsonObject:
    kind = item.get("type") or "message"
    prefix = _ITEM_PREFIXES.get(str(kind), "item")
    own_id = f"{prefix}_{request_id.replace('-', '')}_i{index}"
    named = {**item, "id": item.get("id") or own_id, "type": kind}
    content: Any = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more: JsonObject = {"annotations": []} if part == "output_text" else {}
        named["content"] = [{"type": part, "text": content, **more}]
    return named
