# SPDX-License-Identifier: AGPL-3.0-or-later
"""What `GET /generate/text/request/{id}` gives to whom."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask

from devtools.services import ServiceAddresses
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes
from horde.clock import utcnow
from tests.integration.rows import make_request, make_user, make_worker
from tests.integration.text_horde import (
    KNOWN,
    SMALL,
    TextHorde,
    change_request,
    make_shared_key,
    own_text_horde,
    refused,
    start_clean,
)

NOT_FOUND = (404, "RequestNotFound")
NOT_OWNER = (403, "NotRequestOwner")


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_retrieval") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


@pytest.fixture(scope="module")
def owner(app: Flask) -> tuple[int, str]:
    return make_user(UserRoleTypes.TRUSTED)


@pytest.fixture
def key(owner: tuple[int, str]) -> str:
    return owner[1]


def read(horde: TextHorde, request_id: str, key: str | None) -> Any:
    headers = {} if key is None else {"apikey": key}
    path = f"/api/v2/generate/text/request/{request_id}"
    return horde.app.test_client().get(path, headers=headers)


def test_whoever_sent_a_request_reads_it_back(horde: TextHorde, owner: tuple[int, str]) -> None:
    owner_id, key = owner
    workers = [str(make_worker(owner_id)), str(make_worker(owner_id))]
    sent = {
        "prompt": "Once upon a time",
        "params": {"n": 2, "temperature": 0.7, "stop_sequence": ["b", "a"], "max_length": 64},
        "models": [SMALL, KNOWN],
        "workers": workers,
        "worker_blacklist": True,
        "trusted_workers": True,
        "validated_backends": True,
        "slow_workers": True,
        "extra_slow_workers": True,
        "disable_batching": True,
        "softprompt": "a soft prompt",
        "webhook": "https://example.com/hook",
    }
    request_id = horde.queue(key, **sent, dry_run=False, context_fit="ignore", odd=None)
    answer = read(horde, request_id, key)
    assert answer.status_code == 200
    assert answer.json == sent | {"proxied_account": None}
    assert answer.headers["Cache-Control"] == "private, no-store"


def test_what_was_left_out_is_read_back_at_its_default(horde: TextHorde, key: str) -> None:
    assert read(horde, horde.queue(key), key).json == {
        "prompt": "Once upon a time",
        "params": {},
        "models": [],
        "workers": [],
        "worker_blacklist": False,
        "trusted_workers": False,
        "validated_backends": False,
        "slow_workers": True,
        "extra_slow_workers": False,
        "disable_batching": False,
        "softprompt": None,
        "webhook": None,
        "proxied_account": None,
    }


def test_the_prompt_is_the_one_that_was_sent_or_none(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(key, prompt="as it was sent")
    change_request(request_id, prompt="as workers get it")
    assert read(horde, request_id, key).json["prompt"] == "as it was sent"
    change_request(request_id, submitted_prompt=None)
    answer = read(horde, request_id, key)
    assert (answer.status_code, "prompt" in answer.json) == (200, False)


def test_other_keys_read_nothing(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(key)
    assert refused(read(horde, request_id, make_user()[1])) == NOT_OWNER
    assert refused(read(horde, request_id, "no such key")) == (401, "InvalidAPIKey")
    assert refused(read(horde, request_id, ANONYMOUS_KEY)) == (403, "AnonForbidden")
    missing = read(horde, request_id, None)
    assert (missing.status_code, list(missing.json["errors"])) == (400, ["apikey"])


def test_nobody_reads_a_request_of_anonymous(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(ANONYMOUS_KEY)
    assert refused(read(horde, request_id, ANONYMOUS_KEY)) == (403, "AnonForbidden")
    assert refused(read(horde, request_id, key)) == NOT_OWNER


def test_a_request_of_a_shared_key_is_read_with_it_and_by_its_owner(
    horde: TextHorde, owner: tuple[int, str]
) -> None:
    owner_id, key = owner
    shared, other = make_shared_key(owner_id), make_shared_key(owner_id)
    request_id = horde.queue(shared)
    assert read(horde, request_id, shared).status_code == 200
    assert read(horde, request_id, key).status_code == 200
    assert refused(read(horde, request_id, other)) == NOT_OWNER
    assert refused(read(horde, horde.queue(key), shared)) == NOT_OWNER


def test_a_request_that_an_empty_shared_key_sent_is_read_with_it(
    horde: TextHorde, owner: tuple[int, str]
) -> None:
    owner_id, key = owner
    empty = make_shared_key(owner_id, kudos=0)
    request_id = horde.queue(empty, allow_downgrade=True)
    assert read(horde, request_id, empty).status_code == 200
    assert read(horde, request_id, key).status_code == 200
    assert refused(read(horde, request_id, make_user()[1])) == NOT_OWNER
    assert refused(read(horde, request_id, ANONYMOUS_KEY)) == (403, "AnonForbidden")


def test_what_is_no_text_request_is_not_found(horde: TextHorde, owner: tuple[int, str]) -> None:
    owner_id, key = owner
    text = make_request(owner_id)
    assert read(horde, str(text), key).status_code == 200
    gone = utcnow() - timedelta(seconds=1)
    others = [
        make_request(owner_id, is_chat=True),
        make_request(owner_id, active=False),
        make_request(owner_id, expiry=gone),
        uuid4(),
        "no id",
        str(text).replace("-", ""),
    ]
    for request_id in others:
        assert refused(read(horde, str(request_id), key)) == NOT_FOUND, request_id


def test_a_cancelled_or_faulted_request_is_read_back_too(horde: TextHorde, key: str) -> None:
    cancelled, faulted = horde.queue(key), horde.queue(key)
    horde.cancel(cancelled)
    change_request(faulted, faulted=True)
    for request_id in (cancelled, faulted):
        assert read(horde, request_id, key).status_code == 200
