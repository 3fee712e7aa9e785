# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bodies of calls: read under a bound, parsed and written without holding up other streams.

Source: docs/reference/chat_front.md, "Request".
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive

from horde.chat.tools import write_schemas
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.exceptions import BadRequest
from horde.json_body import parse_json_body
from horde.json_text import JsonObject, JsonText
from horde.oai.errors import RequestRefused
from horde.return_codes import ReturnCode

INLINE_BYTES: Final = 32 * 1024  # parsed in a millisecond or two; a larger body goes to a thread
PARSER_THREADS: Final = 2
MAX_BUFFERED_BYTES: Final = 512 * 1024 * 1024  # bodies of all requests together
# Without a byte in the middle of a body: the place goes to somebody else.
SILENCE_SECONDS: Final = 30.0
DRAIN_SECONDS: Final = 5.0


class ClientGone(Exception):
    """The client hung up, so nobody reads an answer."""


class IncomingBody:
    """The body of one call as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self.has_begun = self.is_complete = False
        self.size_bytes = 0  # once it was read
        self._receive = receive

    async def read_chunk(self) -> bytes:
        """What arrives next. Raises ClientGone."""
        self.has_begun = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.is_complete = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def drain(self) -> None:
        """Read on without keeping anything, so that a client in the middle of its body gets to read
        the answer.
        """
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.is_complete and size <= 2 * MAX_CHAT_BODY_BYTES:
                    size += len(await self.read_chunk())


class BodyReader:
    """Reads the bodies of one process."""

    def __init__(self) -> None:
        self._buffered_bytes = 0
        self._threads = ThreadPoolExecutor(PARSER_THREADS, "front-body")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read[R](
        self,
        headers: Headers,
        incoming: "IncomingBody",
        deadline: float,
        parse: Callable[[object], R],
    ) -> R:
        """What `parse` makes of the JSON in a body that is whole before `deadline`, which is
        monotonic. Raises RequestRefused, or ClientGone.
        """
        encodings = ",".join(headers.getlist("content-encoding")).lower().split(",")
        if any(encoding.strip() not in {"", "identity"} for encoding in encodings):
            raise RequestRefused(
                "unsupported_content_encoding",
                "Send the body without a Content-Encoding.",
                status=415,
            )
        data = await self.read_bytes(headers, incoming, deadline, MAX_CHAT_BODY_BYTES)
        size = len(data)
        incoming.size_bytes = size
        holder = [data]
        del data  # the parser lets go of it before anything else is made of what it held
        return await self.work(size, lambda: parse(_parse_body(holder.pop())))

    async def read_bytes(
        self, headers: Headers, incoming: "IncomingBody", deadline: float, limit_bytes: int
    ) -> bytes:
        """A body that is whole before `deadline`, which is monotonic. Raises RequestRefused, or
        ClientGone.
        """
        if _parse_length(headers) > limit_bytes:
            raise _too_large(limit_bytes)
        buffer = bytearray()
        try:
            await self._fill(buffer, incoming, deadline, limit_bytes)
            return bytes(buffer)
        finally:
            self._buffered_bytes -= len(buffer)

    async def work[T](self, size_bytes: int, do: Callable[[], T]) -> T:
        """Do what takes as long as a body of so many bytes is large, beside the other streams when
        that is long.
        """
        if size_bytes <= INLINE_BYTES:
            return do()
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    async def _fill(
        self,
        buffer: bytearray,
        incoming: "IncomingBody",
        deadline: float,
        limit_bytes: int = MAX_CHAT_BODY_BYTES,
    ) -> None:
        while not incoming.is_complete:
            try:
                async with asyncio.timeout(min(SILENCE_SECONDS, deadline - time.monotonic())):
                    chunk = await incoming.read_chunk()
            except TimeoutError:
                message = (
                    f"The body did not arrive in time, or nothing of it for {SILENCE_SECONDS:.0f}"
                    " seconds. Send the request again."
                )
                raise RequestRefused("incomplete_body", message) from None
            if len(buffer) + len(chunk) > limit_bytes:
                raise _too_large(limit_bytes)
            if self._buffered_bytes + len(chunk) > MAX_BUFFERED_BYTES:
                raise build_overload("too many large requests are being read")
            buffer += chunk
            self._buffered_bytes += len(chunk)


# Written piece by piece in Python: the encoder in C keeps every other stream waiting until it is
# through a whole body.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def build_overload(reason: str) -> RequestRefused:
    """503 of a front that has enough to do; nothing was submitted, so trying again is fine."""
    message = f"The front is busy: {reason}. Try again in a moment."
    return RequestRefused("front_overloaded", message, status=503, headers={"Retry-After": "5"})


def _too_large(limit_bytes: int) -> RequestRefused:
    message = (
        f"The request body is larger than {limit_bytes} bytes. Send fewer or smaller images,"
        " or a shorter history."
    )
    return RequestRefused("request_too_large", message, status=413)


def _parse_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def write_native_body(body: JsonObject) -> bytes:
    """The bytes to submit. Empties the body, which may be large and is not needed any more."""
    written = "".join(_iter_json(write_schemas(body))).encode()
    body.clear()
    return written


def _iter_json(members: Mapping[str, object]) -> Iterator[str]:
    """An object in pieces; keys are names of the native API, which need no escapes."""
    separator = "{"
    for key, value in members.items():
        yield f'{separator}"{key}":'
        if isinstance(value, JsonText):
            yield value.text
        else:
            yield from _ENCODER.iterencode(value)
        separator = ","
    yield "}"


_CODES: Final = {
    ReturnCode.NUL_BYTE_IN_PAYLOAD: "invalid_value",
    ReturnCode.INVALID_PROMPT_ENCODING: "invalid_prompt_encoding",
}


def _parse_body(data: bytes) -> object:
    try:
        return parse_json_body(data, keeps_number_forms=True)
    except BadRequest as refused:
        code = "invalid_json" if refused.rc is None else _CODES.get(refused.rc, "invalid_json")
        raise RequestRefused(code, refused.message) from None
