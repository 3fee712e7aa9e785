# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the life of a completion does about clients that behave badly."""

import asyncio
import time
from typing import cast

import pytest
from starlette.types import Message

from horde.front_config import FrontConfig
from horde.oai import calls
from horde.oai.app import _describe
from horde.oai.bodies import BodyReader, ClientGone, IncomingBody
from horde.oai.calls import Calls, OpenCall
from horde.oai.errors import RequestRefused
from horde.oai.native import NativeClient
from horde.oai.signals import PollingHub


def build_calls() -> Calls:
    return Calls(FrontConfig(), cast(NativeClient, None), PollingHub(), _describe)


def test_a_client_that_takes_nothing_of_its_answer_gives_up_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "SEND_SECONDS", 0.05)

    async def never(_message: Message) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClientGone):
        asyncio.run(build_calls().send_object(OpenCall(), {"a": 1}, never))


def test_a_body_that_stops_arriving_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horde.oai.bodies.SILENCE_SECONDS", 0.05)
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def read() -> None:
        reader = BodyReader()
        try:
            await reader._fill(bytearray(), IncomingBody(receive), time.monotonic() + 60)
        finally:
            reader.close()

    with pytest.raises(RequestRefused) as raised:
        asyncio.run(read())
    assert raised.value.code == "incomplete_body"


def test_bodies_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horde.oai.bodies.MAX_BUFFERED_BYTES", 1000)

    def build_receive() -> IncomingBody:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * 600, "more_body": False}

        return IncomingBody(receive)

    async def read() -> None:
        reader = BodyReader()
        try:
            await reader._fill(bytearray(), build_receive(), time.monotonic() + 60)
            with pytest.raises(RequestRefused) as raised:
                await reader._fill(bytearray(), build_receive(), time.monotonic() + 60)
            assert (raised.value.status, raised.value.code) == (503, "front_overloaded")
        finally:
            reader.close()

    asyncio.run(read())
