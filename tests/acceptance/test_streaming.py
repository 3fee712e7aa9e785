# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streamed chats end to end: the API as processes, a bridge as a process, a backend whose pace the
test sets, and Redis.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from devtools.services import ServiceAddresses
from horde.redis_ctrl import chat_signal_db
from tests.acceptance._scripted_stream import (
    END,
    MODEL,
    WAIT_SECONDS,
    Step,
    StreamingBackend,
    chunk,
)
from tests.acceptance._stack import (
    Account,
    Horde,
    build_shared_environment,
    running_bridge,
    running_horde,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def horde(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Horde]:
    """The API with two processes."""
    services = build_shared_environment(service_urls, "acceptance_streaming")
    with running_horde(services, tmp_path_factory.mktemp("streaming")) as horde:
        yield horde


@pytest.fixture(scope="module")
def owner(horde: Horde) -> Account:
    return horde.create_account("streaming owner")


@pytest.fixture(scope="module")
def client(horde: Horde) -> Account:
    return horde.create_account("streaming client")


@pytest.fixture(scope="module")
def streams(service_urls: ServiceAddresses) -> Iterator[redis.Redis]:
    """The logical database that streams are on."""
    with redis.Redis.from_url(
        service_urls.redis_url, db=chat_signal_db, decode_responses=True
    ) as client:
        yield client


@contextmanager
def serving(horde: Horde, owner: Account, steps: list[Step]) -> Iterator[StreamingBackend]:
    """A bridge with a backend that answers each chat with these steps."""
    with (
        StreamingBackend(steps).running() as backend,
        running_bridge(
            horde, owner.key, backend.url, "streamer", "--supports", "prompt_overflow_refused"
        ),
    ):
        yield backend


def read_stream(streams: redis.Redis, request_id: str) -> list[dict[str, Any]]:
    return [entry for _, entry in streams.xrange(f"horde:chat:stream:{request_id}")]


def test_a_reader_gets_the_text_while_the_bridge_generates(
    horde: Horde, owner: Account, client: Account, streams: redis.Redis
) -> None:
    goes_on = threading.Event()
    with serving(
        horde, owner, [chunk(content="Blue"), goes_on, chunk(content=" it is."), 1.5, END]
    ):
        request_id = horde.api.queue_chat(client.key, MODEL, stream=True)
        (first,) = wait_until(lambda: read_stream(streams, request_id), log=horde.api.log)
        assert (first["seq"], first["content"]) == ("1", "Blue")
        assert not horde.api.get_status("chat", request_id)["done"]
        goes_on.set()
        status = horde.api.wait_for_reply("chat", request_id)
    (generation,) = status["generations"]
    assert generation["message"]["content"] == "Blue it is."
    entries = read_stream(streams, request_id)
    assert "".join(entry["content"] for entry in entries) == "Blue it is."
    assert {(entry["gen"], entry["model"]) for entry in entries} == {(first["gen"], MODEL)}
    assert not streams.exists(f"horde:chat:lease:{first['gen']}")
    assert horde.audit()


def test_a_cancel_stops_the_backend_and_pays_what_was_posted(
    horde: Horde, owner: Account, client: Account, streams: redis.Redis
) -> None:
    paid_before = horde.count_payments(owner)
    endless = [step for _ in range(600) for step in (chunk(content="more "), 0.1)]
    with serving(horde, owner, endless) as backend:
        request_id = horde.api.queue_chat(client.key, MODEL, stream=True)
        wait_until(lambda: read_stream(streams, request_id), log=horde.api.log)
        answer = horde.api.http.delete(
            f"/generate/chat/status/{request_id}", headers={"apikey": client.key}
        )
        assert answer.status_code == 200
        assert backend.was_hung_up.wait(WAIT_SECONDS)
    status = horde.api.get_status("chat", request_id)
    assert (status["generations"], status["processing"], status["waiting"]) == ([], 0, 0)
    assert "1" in [entry.get("ended") for entry in read_stream(streams, request_id)]
    assert horde.count_payments(owner) == paid_before + 1
    assert horde.audit()
