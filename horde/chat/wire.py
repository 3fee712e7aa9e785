# SPDX-License-Identifier: AGPL-3.0-or-later
"""The JSON of chat as it is stored and travels, once it was checked: requests, jobs and replies.

Nothing here checks anything: `messages`, `tools` and `submission` make these shapes of what was
sent. Source: docs/reference/chat_requests.md.
"""

from typing import Literal, NotRequired, TypedDict

from horde.json_text import JsonObject
from horde.shapes.text_params import TextParams

type JsonSchema = JsonObject
"""A client's schema, which may hold any JSON."""


class TextPart(TypedDict):
    """A text among the parts of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(TypedDict):
    """Where an image is: as submitted, as the key it is stored under, or as a worker gets it."""

    url: str
    detail: NotRequired[str]


class ImagePart(TypedDict):
    """An image among the parts of a user's message."""

    type: Literal["image_url"]
    image_url: ImageUrl


type ContentPart = TextPart | ImagePart


class CalledFunction(TypedDict):
    """The function of a call; `arguments` is the model's text, which need not be JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call of an assistant, in the history or in a reply."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """A message of the conversation; `content` is absent, or null once stored, only beside
    calls.
    """

    role: str
    content: NotRequired[str | list[ContentPart] | None]
    name: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]


class Function(TypedDict):
    """What a tool does and takes."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[JsonSchema]
    strict: NotRequired[bool]


class Tool(TypedDict):
    """One function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """The function that a choice forces."""

    name: str


class FunctionChoice(TypedDict):
    """A `tool_choice` that forces one function."""

    type: Literal["function"]
    function: FunctionName


type ToolChoice = str | FunctionChoice
"""`none`, `auto`, `required`, or a function."""


class NamedSchema(TypedDict):
    """The schema that the text of a reply has to follow."""

    name: str
    schema: JsonSchema
    description: NotRequired[str]
    strict: NotRequired[bool]


class ResponseFormat(TypedDict):
    """The form of the reply's text: `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: NotRequired[NamedSchema]


class ImpossibleReason(TypedDict):
    """Why no online worker may ever serve a request: what none declares, and limits of all."""

    kind: str
    missing_declarations: list[str]
    exceeded_limits: list[str]


class ChatExtras(TypedDict, total=False):
    """What a request applies beside its messages and numbers, each only when it was sent."""

    tools: list[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    response_format: ResponseFormat
    stream_progress: bool


class JobPayload(TextParams, total=False):
    """What a worker generates from: a prompt, or the messages of a chat."""

    prompt: str
    softprompt: str
    messages: list[Message]
    messages_url: str
    tools: list[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    response_format: ResponseFormat
    stream_progress: bool


class Reply(TypedDict):
    """The assistant's message that a worker submits; `content` is null only beside calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
