# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts through the routes, the registration page and the commands, on real services."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest
from flask.testing import FlaskClient
from sqlalchemy import select, text
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.app import create_app
from horde.classes.base.kudos import Account, Currency, EntryType, Movements
from horde.classes.base.user import (
    ANONYMOUS_KEY,
    User,
    UserRoleTypes,
    UserSharedKey,
    is_pseudonymous,
)
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextWorker
from horde.cli import main as command
from horde.clock import utcnow
from horde.config import Config
from horde.database import users
from horde.database.account_cache import start_account_listener
from horde.database.kudos import append_movements, fold_postings
from horde.database.migrate import migrate
from horde.database.passkeys import generate_proxy_passkey, resolve_client_address
from horde.database.users import (
    charge_shared_key,
    create_user,
    find_caller,
    find_generate_caller,
    set_role,
)
from horde.db import transaction
from tests.integration.statements import count_statements
from tests.services import make_database

serial = count(1)

UNKNOWN_KEY = "abcdefghijklmnopqrstuv"


@pytest.fixture(scope="module")
def config(service_urls: ServiceAddresses) -> Config:
    """The settings of a horde with a database of this module's own; account 1 is its admin."""
    return Config(
        database_url=make_database(service_urls.database_url, "accounts").replace(
            "postgresql://", "postgresql+psycopg2://", 1
        ),
        redis_url=service_urls.redis_url,
        secret_key="salt of the tests",
        admins=("admin#1",),
        rate_limits_enabled=False,
        test_apikeys=True,
        title="Test horde",
    )


@pytest.fixture(scope="module")
def application(config: Config) -> Iterator[Any]:
    """The API on a migrated database."""
    before = db.state.get()
    app = create_app(config)
    engine = db.require_engine()
    migrate(engine, secret_key=config.secret_key)
    yield app
    engine.dispose()
    db.state.set(before)


@pytest.fixture
def client(application: Any) -> FlaskClient:
    """A client of the API."""
    return application.test_client()  # type: ignore[no-any-return]


class Person:
    """An account and its key."""

    def __init__(self, user_id: int, api_key: str, username: str) -> None:
        self.id, self.api_key, self.alias = user_id, api_key, f"{username}#{user_id}"

    @property
    def header(self) -> dict[str, str]:
        """What its programs send."""
        return {"apikey": self.api_key}


@pytest.fixture(scope="module")
def admin(application: Any) -> Person:
    """The account that the settings name."""
    person = make_person(username="admin")
    assert person.id == 1
    return person


@pytest.fixture
def moderator(admin: Person) -> Person:
    """A moderator who is no admin."""
    return make_person(UserRoleTypes.MODERATOR)


@pytest.fixture
def person(admin: Person) -> Person:
    """An ordinary account."""
    return make_person()


def make_person(
    *roles: UserRoleTypes, username: str | None = None, oauth_id: str | None = None
) -> Person:
    name = username or f"person {next(serial)}"
    with transaction() as session:
        made = create_user(
            session, username=name, oauth_id=oauth_id or f"test_{uuid4().hex}", now=utcnow()
        )
        for role in roles:
            set_role(session, made.user.id, role, granted=True, now=utcnow())
        return Person(made.user.id, made.api_key, name)


def get(client: FlaskClient, path: str, viewer: Person | None = None) -> TestResponse:
    return client.get(f"/api/v2{path}", headers=viewer.header if viewer else {})


def put(client: FlaskClient, account: Person | int, body: object, caller: Person) -> TestResponse:
    number = account if isinstance(account, int) else account.id
    return client.put(f"/api/v2/users/{number}", json=body, headers=caller.header)


def refusal(answer: TestResponse) -> tuple[int, str | None]:
    assert answer.json is not None
    return answer.status_code, answer.json.get("rc")


PUBLIC_FIELDS = {
    *(
        "username",
        "id",
        "kudos",
        "concurrency",
        "worker_invited",
        "moderator",
        "kudos_details",
        "worker_count",
        "styles",
    ),
    *(
        "trusted",
        "flagged",
        "service",
        "education",
        "customizer",
        "deleted",
        "pseudonymous",
        "account_age",
    ),
    *("usage", "contributions", "records"),
}
OWNER_FIELDS = {"worker_ids", "sharedkey_ids", "vpn", "special", "active_generations"}
MODERATOR_FIELDS = {"evaluating_kudos", "monthly_kudos", "suspicious"}


# Who a key belongs to


def test_the_anonymous_account_is_there_from_the_start(client: FlaskClient) -> None:
    answer = client.get("/api/v2/find_user", headers={"apikey": ANONYMOUS_KEY})
    assert answer.status_code == 200
    assert answer.json is not None
    assert (answer.json["id"], answer.json["username"], answer.json["concurrency"]) == (
        0,
        "Anonymous#0",
        500,
    )
    assert answer.json["worker_ids"] == []


def test_find_user_shows_the_owner_part(client: FlaskClient, person: Person) -> None:
    answer = get(client, "/find_user", person)
    assert answer.json is not None
    assert answer.json.keys() == PUBLIC_FIELDS | OWNER_FIELDS
    assert answer.json["username"] == person.alias
    assert answer.json["records"]["request"] == {"image": 0, "text": 0, "interrogation": 0}
    assert answer.json["records"]["usage"] == {"megapixelsteps": 0, "tokens": 0}
    assert set(answer.json["kudos_details"].values()) == {0}
    assert answer.json["active_generations"] == {"text": [], "image": [], "alchemy": []}


def test_find_user_without_a_key_and_with_an_unknown_one(
    client: FlaskClient, admin: Person
) -> None:
    assert refusal(client.get("/api/v2/find_user")) == (401, "InvalidAPIKey")
    for key in (UNKNOWN_KEY, str(uuid4()), "ü" * 22, "x" * 5000):
        assert refusal(client.get("/api/v2/find_user", headers={"apikey": key})) == (
            404,
            "UserNotFound",
        )


@pytest.mark.parametrize(
    ("name", "suffix"), [(None, " (Shared Key)"), ("party", " (Shared Key: party)")]
)
def test_a_shared_key_finds_its_owner_as_everybody_sees_it(
    client: FlaskClient, person: Person, name: str | None, suffix: str
) -> None:
    with transaction() as session:
        session.add(sharedkey := UserSharedKey(user_id=person.id, name=name))
        session.flush()
    answer = client.get("/api/v2/find_user", headers={"apikey": str(sharedkey.id)})
    assert answer.json is not None
    assert answer.json["username"] == person.alias + suffix
    assert answer.json.keys() == PUBLIC_FIELDS


def test_a_known_key_costs_no_statement_and_an_unknown_one_a_single_one(person: Person) -> None:
    with transaction() as session:
        assert count_statements(session, lambda: find_caller(session, person.api_key)) == 1
        assert count_statements(session, lambda: find_caller(session, person.api_key)) == 0
        assert count_statements(session, lambda: find_generate_caller(session, person.api_key)) == 0
        assert count_statements(session, lambda: find_caller(session, UNKNOWN_KEY)) == 1
        assert count_statements(session, lambda: find_caller(session, None)) == 0


def test_a_change_is_seen_by_the_next_call(person: Person) -> None:
    with transaction() as session:
        caller = find_caller(session, person.api_key)
        assert caller is not None
        assert not caller.is_trusted
    with transaction() as session:
        set_role(session, person.id, UserRoleTypes.TRUSTED, granted=True, now=utcnow())
    with transaction() as session:
        caller = find_caller(session, person.api_key)
        assert caller is not None
        assert caller.is_trusted


def test_a_change_elsewhere_reaches_this_process_through_redis(person: Person) -> None:
    stop = threading.Event()
    thread = start_account_listener(stop)
    try:
        with transaction() as session:
            find_caller(session, person.api_key)
            session.execute(
                text("UPDATE users SET concurrency = 77 WHERE id = :id"), {"id": person.id}
            )
        deadline = time.monotonic() + 5
        concurrency = 30
        while concurrency == 30 and time.monotonic() < deadline:
            redis_ctrl.publish("horde:account_changed", str(person.id))  # as another process would
            time.sleep(0.02)
            with transaction() as session:
                caller = find_caller(session, person.api_key)
                assert caller is not None
                concurrency = caller.concurrency
        assert concurrency == 77
    finally:
        stop.set()
        thread.join(60)


def test_a_wiped_account_is_found_by_nothing(client: FlaskClient, person: Person) -> None:
    with transaction() as session:
        session.get_one(User, person.id).oauth_id = "<wiped>"
    assert refusal(get(client, "/find_user", person)) == (404, "UserNotFound")
    assert refusal(get(client, f"/users/{person.id}")) == (404, "UserNotFound")
    with transaction() as session:
        session.execute(text("DELETE FROM users WHERE id = :id"), {"id": person.id})


def test_on_generate_routes_a_shared_key_acts_for_its_owner_with_a_fresh_budget(
    person: Person,
) -> None:
    with transaction() as session:
        session.add(
            sharedkey := UserSharedKey(
                user_id=person.id, kudos=10, expiry=utcnow() - timedelta(days=1)
            )
        )
        session.flush()
        for budget in (10, 3):
            sharedkey.kudos = budget
            session.flush()
            caller = find_generate_caller(session, str(sharedkey.id))
            assert caller is not None
            assert caller.sharedkey is not None
            assert (caller.id, caller.sharedkey.kudos) == (person.id, budget)
            assert caller.sharedkey.is_expired(utcnow())
            assert (
                caller.sharedkey.covers(Decimal(3)),
                caller.sharedkey.covers(Decimal("10.01")),
            ) == (True, False)
        assert find_caller(session, str(sharedkey.id)) is None


@pytest.mark.parametrize(
    ("budget", "charges", "left", "utilized"),
    [(100, ["10", "1.22"], 89, 11), (5, ["10"], 0, 10), (0, ["10"], 0, 0), (-1, ["10"], -1, 10)],
)
def test_charges_of_a_shared_key(
    person: Person, budget: int, charges: list[str], left: int, utilized: int
) -> None:
    with transaction() as session:
        session.add(sharedkey := UserSharedKey(user_id=person.id, kudos=budget))
        session.flush()
        for amount in charges:
            assert (
                count_statements(
                    session,
                    lambda amount=amount: charge_shared_key(session, sharedkey.id, Decimal(amount)),
                )
                == 1
            )
        session.refresh(sharedkey)
        assert (sharedkey.kudos, sharedkey.utilized) == (left, utilized)


@pytest.mark.race
def test_charges_at_once_are_all_counted(person: Person) -> None:
    with transaction() as session:
        session.add(sharedkey := UserSharedKey(user_id=person.id, kudos=1000))
        session.flush()

    def charge() -> None:
        with transaction() as session:
            charge_shared_key(session, sharedkey.id, Decimal(5))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(charge) for _ in range(30)]:
            future.result()
    with transaction() as session:
        stored = session.get_one(UserSharedKey, sharedkey.id)
        assert (stored.kudos, stored.utilized) == (850, 150)


# What an account is


def test_each_privilege_sees_its_fields(
    client: FlaskClient, person: Person, moderator: Person
) -> None:
    other = make_person()
    for viewer, fields in (
        (None, PUBLIC_FIELDS),
        (other, PUBLIC_FIELDS),
        (person, PUBLIC_FIELDS | OWNER_FIELDS),
        (moderator, PUBLIC_FIELDS | OWNER_FIELDS | MODERATOR_FIELDS),
    ):
        answer = get(client, f"/users/{person.id}", viewer)
        assert answer.json is not None
        assert answer.json.keys() == fields


def test_details_tell_workers_and_requests(client: FlaskClient, person: Person) -> None:
    with transaction() as session:
        session.add(worker := TextWorker(user_id=person.id, name=f"worker {next(serial)}"))
        session.add_all(
            [
                text_request := TextWaitingPrompt(
                    user_id=person.id, prompt="x", n=1, jobs=1, active=True
                ),
                TextWaitingPrompt(
                    user_id=person.id, prompt="x", n=1, jobs=1, active=True, is_chat=True
                ),
                TextWaitingPrompt(user_id=person.id, prompt="x", n=0, jobs=1, active=True),
                TextWaitingPrompt(
                    user_id=person.id, prompt="x", n=1, jobs=1, active=True, faulted=True
                ),
            ]
        )
        session.flush()
    own, public = (
        get(client, f"/users/{person.id}", person).json,
        get(client, f"/users/{person.id}").json,
    )
    assert own is not None
    assert public is not None
    assert own["worker_ids"] == [str(worker.id)]
    assert own["active_generations"]["text"] == [str(text_request.id)]
    assert public["worker_count"] == 1
    assert "worker_ids" not in public
    with transaction() as session:
        session.get_one(User, person.id).public_workers = True
    shown = get(client, f"/users/{person.id}").json
    assert shown is not None
    assert shown["worker_ids"] == [str(worker.id)]


@pytest.mark.parametrize(
    "user_id",
    [
        "2147483647",
        "2147483648",
        "99999999999999999999",
        "-1",
        "1.0",
        "1e3",
        "one",
        "٣",
        "%00",
        "1%20",
        "0x1",
        "'",
    ],
)
def test_an_id_that_nobody_has_is_not_found(
    client: FlaskClient, person: Person, user_id: str
) -> None:
    answer = client.get(f"/api/v2/users/{user_id}")
    assert answer.status_code in ({404, 400} if user_id == "%00" else {404})
    if user_id != "%00":
        assert refusal(answer) == (404, "UserNotFound")
        changed = client.put(
            f"/api/v2/users/{user_id}", json={"public_workers": True}, headers=person.header
        )
        assert refusal(changed) == (404, "UserNotFound")


def test_details_with_an_unknown_key_are_refused(client: FlaskClient, person: Person) -> None:
    answer = client.get(f"/api/v2/users/{person.id}", headers={"apikey": UNKNOWN_KEY})
    assert refusal(answer) == (401, "InvalidAPIKey")


# Changing accounts


@pytest.mark.parametrize(
    ("body", "rc"),
    [
        ({"kudos": 5}, "NotAdmin"),
        ({"monthly_kudos": 5}, "NotAdmin"),
        ({"usage_multiplier": 2}, "NotAdmin"),
        ({"moderator": True}, "NotAdmin"),
        ({"trusted": True}, "NotModerator"),
        ({"concurrency": 100}, "NotModerator"),
        ({"admin_comment": "a comment"}, "NotModerator"),
        ({"public_workers": True, "flagged": False}, "NotModerator"),
        ({"generate_proxy_passkey": True}, "NonServiceForbidden"),
    ],
)
def test_an_owner_changes_little(
    client: FlaskClient, person: Person, body: dict[str, object], rc: str
) -> None:
    assert refusal(put(client, person, body, person)) == (403, rc)


def test_a_moderator_is_no_admin(client: FlaskClient, person: Person, moderator: Person) -> None:
    for body in ({"kudos": 5}, {"moderator": True}, {"trusted": True, "usage_multiplier": 2}):
        assert refusal(put(client, person, body, moderator)) == (403, "NotAdmin")


def test_nobody_changes_a_strangers_account(client: FlaskClient, person: Person) -> None:
    assert refusal(put(client, make_person(), {"public_workers": True}, person)) == (
        403,
        "NotModerator",
    )


def test_the_anonymous_account_changes_nothing(client: FlaskClient, admin: Person) -> None:
    anonymous = Person(0, ANONYMOUS_KEY, "Anonymous")
    assert refusal(put(client, 0, {"public_workers": False}, anonymous)) == (
        403,
        "AnonForbiddenUserMod",
    )


@pytest.mark.parametrize(
    "body",
    [{}, {"unknown": 1}, {"reason": "for fun"}, {"public_workers": None}, {"undelete": False}],
)
def test_a_change_of_nothing_is_refused(
    client: FlaskClient, person: Person, body: dict[str, object]
) -> None:
    assert refusal(put(client, person, body, person)) == (400, "NoUserModSelected")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("public_workers", "yes"),
        ("public_workers", 1),
        ("username", 5),
        ("username", "ab"),
        ("username", "\u200b\u200b\u200b\u200b"),
        ("contact", "abc"),
        ("contact", "x" * 501),
        ("concurrency", 501),
        ("concurrency", -1),
        ("concurrency", "5"),
        ("concurrency", 1.5),
        ("worker_invited", 2**40),
        ("kudos", 1e300),
        ("kudos", True),
        ("usage_multiplier", 0),
        ("admin_comment", "x" * 501),
    ],
)
def test_a_bad_value_is_named(client: FlaskClient, person: Person, key: str, value: object) -> None:
    answer = put(client, person, {key: value}, person)
    assert answer.json is not None
    assert refusal(answer) == (400, "BadRequest")
    assert list(answer.json["errors"]) == [key]


def test_a_change_needs_a_key_and_an_object(client: FlaskClient, person: Person) -> None:
    missing = client.put(f"/api/v2/users/{person.id}", json={"public_workers": True})
    assert missing.json is not None
    assert (missing.status_code, list(missing.json["errors"])) == (400, ["apikey"])
    unknown = client.put(
        f"/api/v2/users/{person.id}", json={"public_workers": True}, headers={"apikey": UNKNOWN_KEY}
    )
    assert refusal(unknown) == (401, "InvalidAPIKey")
    assert refusal(put(client, person, [], person)) == (400, "BadRequest")


def test_an_owner_changes_name_contact_and_visibility(client: FlaskClient, person: Person) -> None:
    answer = put(
        client,
        person,
        {"username": "  new <b>name ", "contact": "me@example.org", "public_workers": True},
        person,
    )
    assert answer.json == {
        "username": "new bname",
        "contact": "me@example.org",
        "public_workers": True,
    }
    details = get(client, f"/users/{person.id}", person).json
    assert details is not None
    assert (details["username"], details["contact"]) == (f"new bname#{person.id}", "me@example.org")


def test_a_long_name_is_refused(client: FlaskClient, person: Person) -> None:
    assert refusal(put(client, person, {"username": "x" * 31}, person)) == (400, "TooLongUserName")


def test_a_moderator_grants_and_revokes(
    client: FlaskClient, person: Person, moderator: Person
) -> None:
    roles = ("trusted", "flagged", "customizer", "vpn", "service", "special")
    granted = put(client, person, {**dict.fromkeys(roles, True), "worker_invited": 3.0}, moderator)
    assert granted.json == {**dict.fromkeys(roles, True), "worker_invited": 3}
    details = get(client, f"/users/{person.id}", moderator).json
    assert details is not None
    assert all(details[role] for role in roles)
    put(client, person, dict.fromkeys(roles, False), moderator)
    details = get(client, f"/users/{person.id}", moderator).json
    assert details is not None
    assert not any(details[role] for role in roles)


def test_the_anonymous_account_holds_no_role(client: FlaskClient, moderator: Person) -> None:
    assert refusal(put(client, 0, {"trusted": True}, moderator)) == (403, "AnonForbiddenUserMod")


def test_an_admin_makes_a_moderator_who_is_trusted(
    client: FlaskClient, person: Person, admin: Person
) -> None:
    assert put(client, person, {"moderator": True}, admin).json == {"moderator": True}
    details = get(client, f"/users/{person.id}").json
    assert details is not None
    assert (details["moderator"], details["trusted"]) == (True, True)


def test_trust_lets_paused_workers_work_and_drains_the_escrow(
    client: FlaskClient, person: Person, moderator: Person
) -> None:
    escrow = Currency(
        user_id=person.id,
        entry_type=EntryType.GENERATION,
        amount=Decimal(60),
        account=Account.ESCROW,
    )
    with transaction() as session:
        session.add(
            worker := TextWorker(user_id=person.id, name=f"worker {next(serial)}", paused=True)
        )
        append_movements(session, uuid4(), Movements(currencies=(escrow,)), utcnow())
    fold_postings()
    put(client, person, {"trusted": True}, moderator)
    fold_postings()
    details = get(client, f"/users/{person.id}", moderator).json
    assert details is not None
    assert (
        details["kudos"],
        details["evaluating_kudos"],
        details["kudos_details"]["accumulated"],
    ) == (85, 0, 60)
    with transaction() as session:
        assert session.get_one(Worker, worker.id).paused is False


def test_education_raises_the_concurrency_and_its_end_lowers_it(
    client: FlaskClient, person: Person, moderator: Person
) -> None:
    def concurrency_after(body: dict[str, object]) -> int:
        put(client, person, body, moderator)
        details = get(client, f"/users/{person.id}").json
        assert details is not None
        return int(details["concurrency"])

    assert concurrency_after({"education": True}) == 200
    assert concurrency_after({"education": False}) == 30
    assert concurrency_after({"education": True, "concurrency": 90}) == 90
    assert concurrency_after({"education": False}) == 90


def test_an_admin_changes_balances_through_the_ledger(
    client: FlaskClient, person: Person, admin: Person
) -> None:
    assert put(client, person, {"kudos": 150.5}, admin).json == {"new_kudos": 150.5}
    assert put(client, person, {"kudos": -50}, admin).json == {"new_kudos": 100.5}
    fold_postings()
    details = get(client, f"/users/{person.id}").json
    assert details is not None
    assert (details["kudos"], details["kudos_details"]["admin"]) == (100, 100)


def test_monthly_kudos_are_paid_at_once_when_they_grow(
    client: FlaskClient, person: Person, admin: Person, moderator: Person
) -> None:
    assert put(client, person, {"monthly_kudos": 300}, admin).json == {"monthly_kudos": 300}
    assert put(client, person, {"monthly_kudos": -500}, admin).json == {"monthly_kudos": 0}
    fold_postings()
    details = get(client, f"/users/{person.id}", moderator).json
    assert details is not None
    assert (details["kudos"], details["kudos_details"]["recurring"]) == (300, 300)
    assert re.fullmatch(
        r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d \+0000", details["monthly_kudos"]["last_received"]
    )


def test_undelete_needs_an_account_marked_for_deletion(client: FlaskClient, person: Person) -> None:
    assert refusal(put(client, person, {"undelete": True}, person)) == (400, "UserNotDeleted")
    with transaction() as session:
        set_role(session, person.id, UserRoleTypes.DELETED, granted=True, now=utcnow())
    assert put(client, person, {"undelete": True}, person).json == {"undeleted": True}
    assert refusal(put(client, person, {"undelete": True}, person)) == (400, "UserNotDeleted")


# Services and the clients behind them


def test_a_passkey_speaks_for_clients_until_it_is_replaced(client: FlaskClient) -> None:
    service = make_person(UserRoleTypes.SERVICE)
    answers = [
        put(client, service, {"generate_proxy_passkey": True}, service).json for _ in range(2)
    ]
    old, new = (answer["proxy_passkey"] for answer in answers if answer is not None)
    assert len(new) == 16
    assert resolve_client_address("192.0.2.1", "2001:DB8::1", new) == "2001:db8::1"
    assert resolve_client_address("192.0.2.1", "198.51.100.7", old) == "192.0.2.1"
    assert resolve_client_address("192.0.2.1", "198.51.100.7", "anything") == "192.0.2.1"
    assert resolve_client_address("192.0.2.1", "198.51.100.7", None) == "192.0.2.1"
    assert resolve_client_address("192.0.2.1", None, new) == "192.0.2.1"
    assert resolve_client_address("192.0.2.1", "not an address", new) == "192.0.2.1"
    assert resolve_client_address("192.0.2.1", "198.51.100.7", "ü") == "192.0.2.1"


@pytest.mark.parametrize("role", [UserRoleTypes.FLAGGED, UserRoleTypes.DELETED])
def test_a_barred_service_speaks_for_nobody(role: UserRoleTypes) -> None:
    service = make_person(UserRoleTypes.SERVICE, role)
    with transaction() as session:
        passkey = generate_proxy_passkey(session, service.id)
    assert resolve_client_address("192.0.2.1", "198.51.100.7", passkey) == "192.0.2.1"


# Accounts for tests


def test_a_test_account_is_made_once_and_then_gets_a_new_key(
    client: FlaskClient, admin: Person
) -> None:
    body = {"username": "tester", "oauth_id": f"tests_{uuid4().hex}"}
    first = client.post("/api/v2/dev/test-user", json=body)
    assert first.json is not None
    assert first.status_code == 201
    assert first.json | {"api_key": "", "user_id": ""} == {
        "api_key": "",
        "user_id": "",
        "username": "tester",
        "alias": f"tester#{first.json['user_id']}",
        "kudos": 10000,
        "trusted": True,
        "moderator": True,
        "created": True,
    }
    second = client.post("/api/v2/dev/test-user", json={**body, "moderator": False, "kudos": 50})
    assert second.json is not None
    assert (second.status_code, second.json["created"], second.json["user_id"]) == (
        200,
        False,
        first.json["user_id"],
    )
    for answer, status in ((first.json, 404), (second.json, 200)):
        assert (
            client.get("/api/v2/find_user", headers={"apikey": answer["api_key"]}).status_code
            == status
        )
    details = get(client, f"/users/{first.json['user_id']}").json
    assert details is not None
    assert (details["kudos"], details["moderator"], details["trusted"]) == (50, False, True)


def test_test_accounts_are_for_this_machine(client: FlaskClient, admin: Person) -> None:
    far = client.post("/api/v2/dev/test-user", json={}, environ_base={"REMOTE_ADDR": "192.0.2.1"})
    assert refusal(far) == (403, "Forbidden")
    for address in ("::1", "::ffff:127.0.0.1", "127.0.0.9"):
        assert (
            client.post(
                "/api/v2/dev/test-user", json={}, environ_base={"REMOTE_ADDR": address}
            ).status_code
            == 201
        )


def test_test_accounts_are_off_unless_switched_on(
    application: Any, config: Config, client: FlaskClient
) -> None:
    switched_off = Config(
        database_url=config.database_url, redis_url=config.redis_url, secret_key=config.secret_key
    )
    application.extensions["horde.config"] = switched_off
    try:
        answer = client.post("/api/v2/dev/test-user", json={})
        told = "This horde makes no test accounts."
        assert (answer.status_code, answer.json["message"]) == (404, told)
    finally:
        application.extensions["horde.config"] = config


# The registration page


def test_the_form_is_a_plain_page(client: FlaskClient, admin: Person) -> None:
    page = client.get("/register")
    assert (page.status_code, page.mimetype) == (200, "text/html")
    assert 'method="post" action="/register">' in page.text
    own = page.text.count('<script type="module" src="/pages/')
    assert page.text.count("<script") == own  # nothing inside the page, and it works without
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("", "Pseudonymous"),
        ("  Ada  <Lovelace> ", "Ada Lovelace"),
        ("<script>alert(1)", "scriptalert(1)"),
    ],
)
def test_registering_shows_a_key_that_works(
    client: FlaskClient, admin: Person, typed: str, name: str
) -> None:
    page = client.post("/register", data={"username": typed})
    assert (page.status_code, page.headers["Cache-Control"]) == (200, "no-store")
    key = re.search(r'class="key"[^>]*>([A-Za-z0-9_-]{22})<', page.text)
    assert key is not None
    found = client.get("/api/v2/find_user", headers={"apikey": key[1]}).json
    assert found is not None
    assert (found["username"].rpartition("#")[0], found["pseudonymous"]) == (name, True)
    assert f"{name}#{found['id']}" in page.text
    with transaction() as session:
        assert is_pseudonymous(session.get_one(User, found["id"]).oauth_id)


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        ({"username": "x" * 31}, {}, 400),
        ({"username": "me"}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ({"username": "x" * 20_000}, {}, 413),
    ],
)
def test_a_refused_registration_makes_no_account(
    client: FlaskClient, admin: Person, data: dict[str, str], headers: dict[str, str], status: int
) -> None:
    assert (before := count_users()) == count_users()
    assert client.post("/register", data=data, headers=headers).status_code == status
    assert count_users() == before


def test_raid_mode_registers_nobody(client: FlaskClient, admin: Person) -> None:
    set_raid(True)
    try:
        assert client.post("/register", data={}).status_code == 403
    finally:
        set_raid(False)


def test_names_are_escaped_on_the_page(client: FlaskClient, admin: Person) -> None:
    page = client.post("/register", data={"username": '"&' + "x" * 31})
    assert "&#34;&amp;xxx" in page.text


# The commands


def test_user_create_prints_the_account(
    application: Any,
    config: Config,
    run: Callable[..., tuple[int, Any]],
    client: FlaskClient,
    admin: Person,
) -> None:
    code, made = run("user", "create", "--username", "demo", "--trusted", "--kudos", "500")
    assert code == 0
    assert made.keys() == {"id", "alias", "api_key"}
    found = client.get("/api/v2/find_user", headers={"apikey": made["api_key"]}).json
    assert found is not None
    assert (found["username"], found["kudos"], found["trusted"], found["pseudonymous"]) == (
        made["alias"],
        500,
        True,
        False,
    )


def test_user_role_and_kudos_take_an_id_or_an_alias(
    run: Callable[..., tuple[int, Any]], person: Person
) -> None:
    assert run("user", "role", person.alias, "moderator") == (
        0,
        {"id": person.id, "alias": person.alias, "roles": ["moderator", "trusted"]},
    )
    assert run("user", "role", str(person.id), "moderator", "--remove")[1]["roles"] == ["trusted"]
    # 25 to start from: the floor every account is lifted to by its first movement
    assert run("user", "kudos", str(person.id), "99.5")[1]["kudos"] == 124.5
    assert run("user", "kudos", person.alias, "-20")[1]["kudos"] == 104.5


def test_commands_refuse_users_that_are_not_there(
    run: Callable[..., tuple[int, Any]], admin: Person
) -> None:
    for name in ("nobody#12345", "nobody#1", "999999999999999", ""):
        assert run("user", "kudos", name, "1") == (1, None)
    assert run("user", "role", "0", "trusted") == (1, None)


def test_kudos_audit_answers_with_its_exit_code(
    run: Callable[..., tuple[int, Any]], person: Person
) -> None:
    run("user", "kudos", str(person.id), "40")
    code, report = run("kudos", "audit")
    assert (code, report["discrepancies"]) == (0, [])
    with transaction() as session:
        session.execute(text("UPDATE users SET kudos = 41 WHERE id = :id"), {"id": person.id})
    code, report = run("kudos", "audit")
    assert code == 1
    assert report["discrepancies"] == [
        {"kind": "shown_balance", "subject": str(person.id), "expected": "40", "found": "41"}
    ]
    with transaction() as session:
        session.execute(text("UPDATE users SET kudos = 40 WHERE id = :id"), {"id": person.id})


@pytest.fixture
def run(
    application: Any,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., tuple[int, Any]]]:
    """Run a command of `horde` in this process: its exit code and the JSON on its stdout."""
    connected = db.state.get()
    monkeypatch.setenv("DATABASE_URL", config.database_url)
    monkeypatch.setenv("REDIS_URL", config.redis_url)
    monkeypatch.setenv("secret_key", config.secret_key)

    def run_command(*arguments: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = command.main(arguments)
        db.disconnect()
        db.state.set(connected)
        redis_ctrl.connect(config)
        users.configure(config)
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else None

    return run_command


def count_users() -> int:
    with transaction() as session:
        return len(session.scalars(select(User.id)).all())


def set_raid(raid: bool) -> None:
    with transaction() as session:
        session.execute(text("DELETE FROM settings"))
        session.execute(
            text(
                "INSERT INTO settings (raid, invite_only, maintenance) VALUES (:raid, false, false)"
            ),
            {"raid": raid},
        )


def test_ids_are_those_of_the_columns() -> None:
    assert users.parse_user_id("0") == 0
    assert users.parse_uuid(str(UUID(int=5))) == UUID(int=5)
