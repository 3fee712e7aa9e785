# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a form of the front has to say for itself: how its bodies are read, its answers and streams
written.

A form is one API that programs speak. The core waits, streams, keeps budgets, words failures and
counts for all of them; what it asks of a form stands here. Source: docs/explanation/front-forms.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Protocol

from horde.chat_contract import ChatHordeOptions
from horde.json_text import JsonObject
from horde.oai.errors import ErrorAnswer
from horde.oai.mapping import CompletedReply
from horde.oai.native import Caller
from horde.oai.relay import Delta, Remainder
from horde.oai.sse import KEEP_ALIVE


class FormName(StrEnum):
    """An attribute of the front's figures."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"


class FormRequest(Protocol):
    """A body that a form has read."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""

    def locate(self, param: str) -> str:
        """The client's own name of what the horde calls `param`, such as `max_tokens`."""


class ChatFormRequest(FormRequest, Protocol):
    """A body that a form over chat requests has read."""

    @property
    def native_body(self) -> JsonObject:
        """What is submitted, without an operation key; emptied once it is written."""

    @property
    def horde(self) -> ChatHordeOptions:
        """The horde's own options."""

    @property
    def model(self) -> str | None:
        """The one model asked for; None for a list."""

    @property
    def include_reasoning(self) -> bool:
        """Whether the client is shown what the model thought."""

    @property
    def is_length_open(self) -> bool:
        """Whether a reply may be shorter than what is submitted says, since the client chose no
        length, or only a bound. Asked before the submit.
        """


class ChatAnswer(ABC):
    """What one accepted request is answered with: an object, or the bytes of a stream in their
    order.

    It may hold what the stream has said so far.
    """

    # Most forms have nothing to do in these two.
    async def begin(self) -> None:  # noqa: B027
        """Called once the horde took the request, before anything is waited for."""

    async def settle(  # noqa: B027
        self, reply: CompletedReply, remainder: Remainder | None
    ) -> None:
        """Called with the reply before the last bytes are made. `remainder` is what a stream has
        not sent yet, None where there is no stream.
        """

    @abstractmethod
    def render(self, reply: CompletedReply) -> JsonObject:
        """The object of a call that does not stream."""

    def open(self) -> bytes:
        """The first bytes of a stream that opens before there is text."""
        return self.fill_silence()

    def fill_silence(self) -> bytes:
        """What keeps a silent connection open."""
        return KEEP_ALIVE

    @abstractmethod
    def write_deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Events of text that was relayed; never empty."""

    @abstractmethod
    def finish(self, reply: CompletedReply, remainder: Remainder) -> bytes:
        """The last events: `remainder` is the text that was not relayed."""

    @abstractmethod
    def fail(self, error: ErrorAnswer) -> bytes:
        """The last events of an open stream that failed."""


class ChatForm[R: ChatFormRequest](ABC):
    """A form over chat requests. One object serves every call of a process."""

    name: ClassVar[FormName]
    # After so long without a byte of a stream `fill_silence` speaks; None is the front's setting.
    silence_seconds: float | None = None

    @abstractmethod
    def parse(self, body: object) -> R:
        """Read a decoded body, in any thread. Raises RequestRefused for the first key at fault."""

    async def prepare(self, request: R, caller: Caller) -> None:  # noqa: B027  most need nothing
        """Look up what the request needs before it is submitted. Raises FrontFailure."""

    @abstractmethod
    def begin_answer(self, request: R, request_id: str, created: int) -> ChatAnswer:
        """The answer of a request that the horde took; `created` is in Unix seconds."""

    @abstractmethod
    def render_quote(self, request: R, quote: Mapping[str, object], created: int) -> JsonObject:
        """The answer to a dry run, from the native one."""

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error."""
        return error.build_body()
