# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shared keys as their owners make, change and delete them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import func, select
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde.apis.v2 import kobold, sharedkeys, users
from horde.classes.base.kudos import KudosReservation, upfront_hold_id
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes, UserSharedKey
from horde.clock import utcnow
from horde.database.kudos import fold_postings, hold_kudos
from horde.database.users import adjust_kudos
from horde.db import transaction
from tests.integration.rows import find_request, make_request, make_user, own_horde

NEW = {
    "name": None,
    "kudos": 5000,
    "expiry": None,
    "utilized": 0,
    "max_image_pixels": -1,
    "max_image_steps": -1,
    "max_text_tokens": -1,
}


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "sharedkeys", (kobold, sharedkeys, users)) as app:
        yield app


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def owner(app: Flask) -> tuple[int, str]:
    return make_user()


def call(
    client: FlaskClient, method: str, path: str, body: object = None, key: str | None = None
) -> TestResponse:
    headers = {} if key is None else {"apikey": key}
    return client.open(f"/api/v2/sharedkeys{path}", method=method, json=body, headers=headers)


def make(client: FlaskClient, key: str, **body: object) -> dict[str, Any]:
    answer = call(client, "PUT", "", body, key)
    assert answer.status_code == 200, answer.json
    made: dict[str, Any] = answer.json  # type: ignore[assignment]
    return made


def read_refusal(answer: TestResponse) -> tuple[int, str]:
    assert answer.json is not None
    return answer.status_code, answer.json["rc"]


def test_a_new_key_has_the_documented_defaults(client: FlaskClient, owner: tuple[int, str]) -> None:
    made = make(client, owner[1])
    UUID(made["id"])
    assert made == {"id": made["id"], "username": made["username"], **NEW}
    assert made["username"].endswith(f"#{owner[0]}")


def test_a_key_is_read_without_an_account(client: FlaskClient, owner: tuple[int, str]) -> None:
    made = make(client, owner[1], name="for the club", kudos=10, expiry=1, max_text_tokens=64)
    assert call(client, "GET", f"/{made['id']}").json == made
    left = parsedate_to_datetime(made["expiry"]).replace(tzinfo=None) - utcnow()
    assert 86_000 < left.total_seconds() < 86_500


def test_changing_the_name_alone_leaves_the_rest(
    client: FlaskClient, owner: tuple[int, str]
) -> None:
    made = make(client, owner[1], kudos=0, expiry=3, max_text_tokens=64)
    changed = call(client, "PATCH", f"/{made['id']}", {"name": "renamed", "kudos": None}, owner[1])
    assert (changed.status_code, changed.json) == (200, made | {"name": "renamed"})


def test_a_change_sets_what_was_sent(client: FlaskClient, owner: tuple[int, str]) -> None:
    made = make(client, owner[1], expiry=3)
    wanted = {
        "kudos": -1,
        "max_text_tokens": 0,
        "max_image_steps": 7,
        "max_image_pixels": 9,
        "name": "abc",
    }
    changed = call(client, "PATCH", f"/{made['id']}", wanted | {"expiry": -1.0}, owner[1])
    assert changed.json == made | wanted | {"expiry": None}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"kudos": -2}, "kudos"),
        ({"kudos": 50_000_001}, "kudos"),
        ({"kudos": "5"}, "kudos"),
        ({"kudos": True}, "kudos"),
        ({"expiry": -2}, "expiry"),
        ({"expiry": 10**9}, "expiry"),
        ({"name": "ab"}, "name"),
        ({"name": "a" * 256}, "name"),
        ({"max_text_tokens": 2**31}, "max_text_tokens"),
        ({"max_image_steps": -2}, "max_image_steps"),
    ],
)
def test_a_value_out_of_its_range_is_refused(
    client: FlaskClient, owner: tuple[int, str], body: object, path: str
) -> None:
    made = make(client, owner[1])
    for answer in (
        call(client, "PUT", "", body, owner[1]),
        call(client, "PATCH", f"/{made['id']}", body, owner[1]),
    ):
        assert read_refusal(answer) == (400, "BadRequest")
        assert path in answer.json["errors"]  # type: ignore[index]


def test_the_anonymous_account_has_no_shared_keys(client: FlaskClient) -> None:
    assert read_refusal(call(client, "PUT", "", {}, ANONYMOUS_KEY)) == (403, "AnonForbidden")


def test_a_key_is_needed_to_make_one(client: FlaskClient) -> None:
    assert read_refusal(call(client, "PUT", "", {}, "abcdefghijklmnopqrstuv")) == (
        401,
        "InvalidAPIKey",
    )
    assert "apikey" in call(client, "PUT", "", {}).json["errors"]  # type: ignore[index]


@pytest.mark.parametrize("sharedkey_id", ["5b0f8ad2-6c3e-4f0a-9a51-2f8d1c7e4b90", "nonsense", "1"])
def test_an_unknown_shared_key_is_a_wrong_key(
    client: FlaskClient, owner: tuple[int, str], sharedkey_id: str
) -> None:
    assert read_refusal(call(client, "GET", f"/{sharedkey_id}")) == (401, "InvalidAPIKey")
    assert read_refusal(call(client, "PATCH", f"/{sharedkey_id}", {"kudos": 1}, owner[1])) == (
        401,
        "InvalidAPIKey",
    )
    assert read_refusal(call(client, "DELETE", f"/{sharedkey_id}", None, owner[1])) == (
        401,
        "InvalidAPIKey",
    )


def test_only_its_owner_changes_and_deletes_a_key(
    client: FlaskClient, owner: tuple[int, str]
) -> None:
    made = make(client, owner[1])
    for key in (make_user()[1], make_user(UserRoleTypes.MODERATOR)[1]):
        assert read_refusal(call(client, "PATCH", f"/{made['id']}", {"kudos": 1}, key)) == (
            403,
            "Forbidden",
        )
        assert read_refusal(call(client, "DELETE", f"/{made['id']}", None, key)) == (
            403,
            "Forbidden",
        )
    assert call(client, "GET", f"/{made['id']}").json == made


def test_a_change_of_nothing_is_refused(client: FlaskClient, owner: tuple[int, str]) -> None:
    made = make(client, owner[1])
    answer = call(client, "PATCH", f"/{made['id']}", {"other": 1}, owner[1])
    assert read_refusal(answer) == (400, "NoSharedKeyModSelected")


@pytest.mark.parametrize(("roles", "count"), [((), 3), ((UserRoleTypes.TRUSTED,), 10)])
def test_an_account_has_so_many_keys_and_no_more(
    client: FlaskClient, roles: tuple[UserRoleTypes, ...], count: int
) -> None:
    key = make_user(*roles)[1]
    first, *_ = [make(client, key) for _ in range(count)]
    assert read_refusal(call(client, "PUT", "", {}, key)) == (403, "Forbidden")
    assert call(client, "DELETE", f"/{first['id']}", None, key).json == {"message": "OK"}
    make(client, key)


def test_keys_made_at_once_keep_to_the_number(app: Flask, owner: tuple[int, str]) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(
                lambda _: call(app.test_client(), "PUT", "", {}, owner[1]).status_code, range(6)
            )
        )
    assert sorted(answers) == [200] * 3 + [403] * 3
    with transaction() as session:
        assert session.scalar(select(func.count()).where(UserSharedKey.user_id == owner[0])) == 3


@pytest.mark.race
def test_of_many_that_delete_a_key_at_once_one_did(
    client: FlaskClient, owner: tuple[int, str]
) -> None:
    made = make(client, owner[1])
    app = client.application

    def delete(_: int) -> int:
        return call(app.test_client(), "DELETE", f"/{made['id']}", None, owner[1]).status_code

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(delete, range(6))) == [200] + [401] * 5


def test_a_deleted_key_takes_its_requests_and_frees_their_kudos(
    client: FlaskClient, owner: tuple[int, str]
) -> None:
    made = make(client, owner[1])
    kept, gone = make_request(owner[0]), make_request(owner[0], sharedkey_id=UUID(made["id"]))
    with transaction() as session:
        adjust_kudos(session, owner[0], Decimal(1000), action="admin", now=utcnow())
    fold_postings()
    with transaction() as session:
        assert hold_kudos(
            session,
            user_id=owner[0],
            business_id=upfront_hold_id(gone),
            amount=Decimal(9),
            now=utcnow(),
        )
    assert call(client, "DELETE", f"/{made['id']}", None, owner[1]).status_code == 200
    assert find_request(kept) is not None
    assert find_request(gone) is None
    with transaction() as session:
        held = select(KudosReservation.active).where(
            KudosReservation.business_id == upfront_hold_id(gone)
        )
        assert session.scalars(held).all() == [False]
    assert read_refusal(call(client, "GET", f"/{made['id']}")) == (401, "InvalidAPIKey")


def test_a_made_key_asks_on_its_owners_account(client: FlaskClient, owner: tuple[int, str]) -> None:
    made = make(client, owner[1], name="friends", max_text_tokens=64)
    found = client.get("/api/v2/find_user", headers={"apikey": made["id"]}).json
    assert (found["id"], found["username"].endswith(" (Shared Key: friends)")) == (owner[0], True)

    def ask(max_length: int) -> TestResponse:
        body = {"prompt": "Once", "params": {"max_length": max_length}}
        return client.post("/api/v2/generate/text/async", json=body, headers={"apikey": made["id"]})

    assert read_refusal(ask(65)) == (400, "BadRequest")
    request_id = ask(64).json["id"]  # type: ignore[index]
    stored = find_request(UUID(request_id))
    assert stored is not None
    assert (stored.user_id, str(stored.sharedkey_id)) == (owner[0], made["id"])
    spent = call(client, "GET", f"/{made['id']}").json
    assert spent is not None
    assert (spent["kudos"], spent["utilized"]) == (4999, 1)
