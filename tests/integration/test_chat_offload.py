# SPDX-License-Identifier: AGPL-3.0-or-later
"""Large messages as one object: from the submit to the worker, and what is left when the store is
away.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select

from devtools.services import ServiceAddresses
from horde import object_deletes, r2, redis_ctrl
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.base.kudos import KudosPosting, KudosReservation
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.clock import utcnow
from horde.database.text_requests import delete_inactive_request
from horde.db import transaction
from tests.integration._fake_chat_worker import ChatHorde, chat_horde, start_anew
from tests.integration.rows import find_request
from tests.integration.stored_chats import is_stored, list_waiting_deletes, open_store
from tests.integration.tcp_gate import TcpGate
from tests.integration.test_object_store import fetch

THRESHOLD = 2000
LARGE = [{"role": "user", "content": "Ünd so weiter. " * 200}]
SMALL = [{"role": "user", "content": "short"}]


@pytest.fixture(scope="module")
def gate(service_urls: ServiceAddresses) -> Iterator[TcpGate]:
    gate = TcpGate(service_urls.s3_endpoint)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses, gate: TcpGate) -> Iterator[ChatHorde]:
    settings: dict[str, Any] = {
        "s3_endpoint": gate.url,
        "chat_messages_offload_enabled": True,
        "chat_messages_offload_bytes": THRESHOLD,
        "chat_messages_offload_gzip": True,
        "free_output_ceiling": 100,  # every request here holds kudos first
        "free_output_floor": 100,
    }
    with chat_horde(service_urls, "chat_offload", **settings) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde, gate: TcpGate) -> Iterator[ChatHorde]:
    start_anew()
    redis_ctrl.delete(object_deletes.RETRY_KEY)
    module_horde.take_nothing()
    yield module_horde
    open_store(gate)


def get_key(request_id: str) -> str:
    return f"{request_id}_chat_messages.json"


def is_offloaded(request_id: str) -> bool:
    request = find_request(UUID(request_id))
    assert request is not None
    return request.chat_messages_offloaded


def count_rows(row_class: type) -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(row_class)) or 0


def count_open_holds() -> int:
    with transaction() as session:
        return len(
            session.scalars(select(KudosReservation.id).where(KudosReservation.active)).all()
        )


def test_large_messages_are_one_object_that_a_worker_fetches(horde: ChatHorde) -> None:
    request_id = horde.queue(messages=LARGE)
    assert is_offloaded(request_id)
    job = horde.take(image_transports=["messages_url"])
    status, headers, body = fetch(job["payload"]["messages_url"])
    assert (status, headers["content-type"], headers["content-encoding"]) == (
        200,
        "application/json",
        "gzip",
    )
    assert json.loads(gzip.decompress(body)) == LARGE
    assert horde.reply(job["id"]).status_code == 200


def test_the_row_keeps_the_messages_for_workers_without_the_transport(horde: ChatHorde) -> None:
    horde.queue(messages=LARGE)
    assert horde.take()["payload"]["messages"] == LARGE


def test_small_messages_stay_inline(horde: ChatHorde) -> None:
    request_id = horde.queue(messages=SMALL)
    assert not is_offloaded(request_id)
    assert not is_stored(get_key(request_id))
    assert horde.take(image_transports=["messages_url"])["payload"]["messages"] == SMALL


def test_what_is_stored_is_what_workers_get(horde: ChatHorde) -> None:
    """Developer as system, as in the row: not what the client sent."""
    request_id = horde.queue(messages=[{"role": "developer", "content": "Be brief."}, *LARGE])
    assert json.loads(gzip.decompress(r2.get_object(get_key(request_id))))[0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_a_dry_run_stores_nothing(horde: ChatHorde, gate: TcpGate) -> None:
    before = gate.connection_count
    gate.close()
    answer = horde.submit(messages=LARGE, horde={"dry_run": True})
    assert answer.status_code == 200
    assert gate.connection_count == before


def test_without_the_setting_nothing_is_stored(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = horde.app.extensions[CONFIG_EXTENSION]
    monkeypatch.setitem(
        horde.app.extensions, CONFIG_EXTENSION, replace(config, chat_messages_offload_enabled=False)
    )
    request_id = horde.queue(messages=LARGE)
    assert not is_offloaded(request_id)
    assert not is_stored(get_key(request_id))


def test_a_store_that_is_away_refuses_without_a_charge(horde: ChatHorde, gate: TcpGate) -> None:
    before = count_rows(KudosPosting)
    gate.close()
    answer = horde.submit(messages=LARGE)
    assert (answer.status_code, answer.json and answer.json["rc"]) == (
        503,
        "ChatImageStorageUnavailable",
    )
    assert count_rows(TextWaitingPrompt) == 0
    assert count_rows(KudosReservation) == 1
    assert count_open_holds() == 0
    assert count_rows(KudosPosting) == before
    assert len(list_waiting_deletes()) >= 1, "the object may have been stored all the same"
    assert horde.submit(messages=SMALL).status_code == 202, "others are served"


def test_the_same_key_works_once_the_store_is_back(horde: ChatHorde, gate: TcpGate) -> None:
    key = {"operation_key": "7d8f0d6e-3f1c-4f2a-9d55-0b6a2f6a7c11"}
    gate.close()
    assert horde.submit(messages=LARGE, horde=key).status_code == 503
    open_store(gate)
    first = horde.submit(messages=LARGE, horde=key)
    assert first.status_code == 202
    assert horde.submit(messages=LARGE, horde=key).json == {
        "id": first.json["id"],
        "kudos": first.json["kudos"],
    }


def test_the_loser_of_a_race_for_a_key_leaves_no_object(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stored their messages; the one whose activation fails deletes its own."""
    key = {"operation_key": "7d8f0d6e-3f1c-4f2a-9d55-0b6a2f6a7c12"}
    stored: list[str] = []
    upload = r2.put_object

    def note(name: str, body: bytes, **options: Any) -> None:
        upload(name, body, **options)
        stored.append(name)
        if len(stored) == 1:  # the twin overtakes between storing and activation
            assert horde.submit(messages=LARGE, horde=key).status_code == 202

    monkeypatch.setattr(r2, "put_object", note)
    answer = horde.submit(messages=LARGE, horde=key)
    assert answer.status_code == 200
    assert stored[1] == get_key(answer.json["id"])
    assert [is_stored(name) for name in stored] == [False, True]


def test_a_row_that_the_cleaner_took_meanwhile_leaves_no_object(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    upload = r2.put_object

    def clean_first(name: str, body: bytes, **options: Any) -> None:
        with transaction() as session:
            delete_inactive_request(session, UUID(name.partition("_")[0]), utcnow())
        upload(name, body, **options)
        stored.append(name)

    monkeypatch.setattr(r2, "put_object", clean_first)
    assert horde.submit(messages=LARGE).status_code == 503
    assert len(stored) == 1
    assert not is_stored(stored[0])
