# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages of the API: what they show, what they cost, and what strangers' text does to them."""

import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import update
from sqlalchemy.orm import Session

from devtools.services import ServiceAddresses
from horde.actions.site import ModelLine, list_model_lines
from horde.apis.site import STATIC_FILES, build_commands
from horde.app import RESOURCE_MODULES
from horde.classes.base.kudos import Account, EntryType, KudosPosting
from horde.classes.base.team import Team
from horde.classes.base.user import ANONYMOUS_KEY
from horde.classes.kobold.worker import TextWorker
from horde.clock import utcnow
from horde.database.account_overview import FLOW_DAYS
from horde.database.figures import add_worker_faults
from horde.database.kudos import hold_kudos
from horde.database.stats import ModelFigures
from horde.database.text_functions import ChatModelOffer
from horde.db import run_transaction, transaction
from tests.integration.rows import (
    forget_everything,
    make_chat_worker,
    make_job,
    make_request,
    make_user,
    make_worker,
    own_horde,
)
from tests.integration.statements import count_statements

MARKUP = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SHOWING = (
    *("/", "/workers", "/teams", "/leaders", "/news", "/register", "/account", "/dashboard"),
    *("/terms", "/privacy", "/sponsors"),
)


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(
        service_urls,
        "site",
        RESOURCE_MODULES,
        title=f"Title {MARKUP}",
        about=f"About {MARKUP}",
        front_url="https://chat.example",
        repository="https://source.example",
    ) as app:
        yield app


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    forget_everything()
    return app.test_client()


@pytest.mark.parametrize("path", [*SHOWING, "/models/nobody-has-it"])
def test_a_page_holds_no_code_and_may_load_nothing_from_elsewhere(
    client: FlaskClient, path: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == (404 if path.startswith("/models") else 200)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(
        r"<style|\son\w+=|\sstyle=|<script(?![^>]* src=\"/pages/)", strip(answer.text)
    )
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]*)"', answer.text)
    assert loaded
    assert all(address.startswith(("/pages/", "data:,")) for address in loaded)


def test_every_page_offers_the_source(client: FlaskClient) -> None:
    for path in (*SHOWING, "/api/", "/nothing-here"):
        page = client.get(path, headers=BROWSER).text
        assert '<a href="https://source.example">Source (AGPL)</a>' in page, path


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/acount", BROWSER["Accept"], "text/html"),
        ("/teams/x/y", "text/html", "text/html"),
        ("/pages/nothing.js", BROWSER["Accept"], "text/html"),
        ("/acount", "*/*", "application/json"),
        ("/acount", "application/json, text/html", "application/json"),
        ("/acount", "", "application/json"),
        ("/api/v2/acount", BROWSER["Accept"], "application/json"),
        ("/API/x", BROWSER["Accept"], "application/json"),
    ],
)
def test_a_mistyped_address_is_a_page_in_a_browser_and_json_for_a_program(
    client: FlaskClient, path: str, accept: str, kind: str
) -> None:
    answer = client.get(path, headers={"Accept": accept})
    assert (answer.status_code, answer.mimetype) == (404, kind)
    if kind == "text/html":
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert 'href="/">To the start</a>' in answer.text
    else:
        assert answer.json["message"]


def test_a_refusal_and_a_failure_are_pages_in_a_browser(
    app: Flask, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = client.get("/account/overview", headers=BROWSER | {"apikey": "x"})
    assert (refused.status_code, refused.mimetype) == (401, "text/html")
    assert "No account has this key." in refused.text
    wrong = client.post("/news", headers=BROWSER)
    assert (wrong.status_code, wrong.mimetype) == (405, "text/html")
    assert "GET" in wrong.headers["Allow"]
    monkeypatch.setattr("horde.apis.site.list_news", lambda _: 1 / 0)
    failed = client.get("/news", headers=BROWSER)
    assert (failed.status_code, failed.mimetype) == (500, "text/html")
    assert "This server failed" in failed.text
    assert client.get("/news").json == {"message": "Internal Server Error"}


def test_files_of_swagger_ui_are_not_served(client: FlaskClient) -> None:
    assert client.get("/swaggerui/swagger-ui.css").status_code == 404


def strip(html: str) -> str:
    """A page without what it escaped."""
    return re.sub(r"&lt;.*?&gt;", "", html)


def test_text_of_others_is_never_markup(client: FlaskClient) -> None:
    owner, _ = make_user(username=MARKUP[:50])
    make_worker(owner, (MARKUP,), name=MARKUP, info=MARKUP)
    make_chat_worker(owner, MARKUP, name=f"chat {MARKUP}", info=MARKUP)
    team_id = make_team(owner)
    paths = ("/", "/workers", "/teams", f"/teams/{team_id}", "/leaders", f"/models/{MARKUP}")
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "<img" not in answer.text
        assert "<script>alert" not in answer.text
        assert "&lt;img src=x" in answer.text


def make_team(owner: int) -> UUID:
    """A team with markup in everything that others see of it, joined by all workers."""
    now = utcnow()
    with transaction() as session:
        team = Team(
            name=MARKUP,
            info=MARKUP,
            owner_id=owner,
            contributions=0,
            fulfilments=0,
            kudos=0,
            uptime=0,
            created=now,
            last_active=now,
        )
        session.add(team)
        session.flush()
        session.execute(update(TextWorker).values(team_id=team.id))
        return team.id


def test_a_team_that_is_not_there_is_told_on_a_page(client: FlaskClient) -> None:
    for team_id in ("x", "00000000-0000-0000-0000-000000000000", "<img src=x>"):
        answer = client.get(f"/teams/{team_id}")
        assert (answer.status_code, answer.mimetype) == (404, "text/html")
        assert "There is no such team." in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/workers", "/models/a/model", "/teams", "/leaders", "/news", "/terms"]
)
def test_a_view_takes_three_statements_at_most(app: Flask, client: FlaskClient, path: str) -> None:
    owner, _ = make_user()
    for _ in range(3):
        make_worker(owner)
    client.get(path)  # fills the caches, as every view but the first finds them
    with transaction() as session:
        count = count_statements(session, lambda: client.get(path))
    assert count <= 3


def test_files_of_the_pages_are_small_and_asked_for_once(client: FlaskClient) -> None:
    first_load = len(client.get("/").data)
    for name in ("horde.css", "site.css", "site.js", "parts.js", "session.js", "account.js"):
        answer = client.get(f"/pages/{name}")
        assert (answer.status_code, answer.headers["Content-Type"]) == (
            200,
            STATIC_FILES[name].kind,
        )
        first_load += len(answer.data)
        again = client.get(f"/pages/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")
    assert first_load < 150_000
    for name in ("nothing.js", "..%2Ffiles.py", "%00"):
        assert client.get(f"/pages/{name}").status_code in (400, 404)


def test_a_model_is_shown_with_its_workers_and_not_with_their_threads(client: FlaskClient) -> None:
    owner, _ = make_user()
    for threads in (1, 4):
        make_worker(owner, ("a/model",), threads=threads)
    make_worker(owner, ("a/model",), maintenance=True)
    for path in ("/", "/models/a/model"):
        page = client.get(path).text
        assert re.search(r'a/model</a></td>\s*<td>text</td>\s*<td class="number">2<', page) or (
            "<dt>Workers</dt><dd>2</dd>" in page
        )


def test_models_of_text_and_chat_are_one_list(client: FlaskClient) -> None:
    figures = {
        "both": ModelFigures(name="both", is_served=True, count=3, performance=5.0, eta=7),
        "gone": ModelFigures(name="gone"),
    }
    offer = ChatModelOffer(
        workers=2, max_context_length=4096, max_length=512, features=("tools",), created=None
    )
    lines = list_model_lines(figures, {"both": offer, "chat": offer}, {"both": 4})
    assert lines == [
        ModelLine(name="both", kinds=("text", "chat"), workers=4, speed=5.0, jobs=0.0, eta=7),
        ModelLine(name="chat", kinds=("chat",), workers=2, speed=0.0, jobs=0.0, eta=0),
    ]


def test_commands_survive_a_shell_whatever_the_model() -> None:
    commands = build_commands("https://horde.example", "a'model; rm -rf /")
    assert "'\"'\"'" in commands["ask"]
    assert "https://horde.example/api --key KEY" in commands["bridge"]


def test_pages_of_workers_are_found_whatever_is_asked_for(client: FlaskClient) -> None:
    for page in ("0", "-1", "99999999999999999999", "x", ""):
        assert client.get(f"/workers?page={page}").status_code == 200


# The account


def test_an_account_sees_what_it_gained_spent_and_has(client: FlaskClient) -> None:
    user_id, key = make_user(username="Ada", kudos=100)
    others_id, _ = make_user()
    worker_id = make_worker(user_id, ("a/model",))
    request_id = make_request(user_id, ("a/model",))
    make_job(request_id, worker_id)
    make_worker(others_id)
    make_request(others_id)
    now = utcnow()
    moments = [(now, "3.50"), (now, "-1.25"), (now - timedelta(days=FLOW_DAYS + 1), "50.00")]

    def post(session: Session) -> None:
        for created, amount in moments:
            session.add(
                KudosPosting(
                    event_id=request_id,
                    entry_type=EntryType.GENERATION,
                    user_id=user_id,
                    account=Account.BALANCE,
                    amount=Decimal(amount),
                    created=created,
                    applied=True,
                )
            )

    run_transaction(post)
    answer = client.get("/account/overview", headers={"apikey": key})
    assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "private, no-store")
    found = answer.json
    assert found["alias"] == f"Ada#{user_id}"
    assert found["days"] == {f"{now:%Y-%m-%d}": {"GENERATION": 3.5, "-GENERATION": 1.25}}
    assert [request["id"] for request in found["requests"]] == [str(request_id)]
    assert found["requests"][0]["processing"] == 1
    assert [(worker["id"], worker["models"]) for worker in found["workers"]] == [
        (str(worker_id), ["a/model"])
    ]
    assert key not in answer.text


def test_an_account_sees_what_is_held_its_workers_faults_and_messages(client: FlaskClient) -> None:
    user_id, key = make_user(username="Ada", kudos=100)
    worker_id = make_worker(user_id, ("a/model",))
    headers = {"apikey": key}
    said = client.post(
        "/api/v2/workers/messages",
        json={"worker_id": str(worker_id), "message": "Update, please."},
        headers=headers,
    )
    assert said.status_code == 200, said.text
    with transaction() as session:
        hold_kudos(
            session, user_id=user_id, business_id="upfront:x", amount=Decimal("4.50"), now=utcnow()
        )
        add_worker_faults(session, {(worker_id, "none"): 2}, utcnow())
    found = client.get("/account/overview", headers=headers).json
    assert found["held"] == 4.5
    assert [(hold["id"], hold["amount"]) for hold in found["reservations"]] == [("upfront:x", 4.5)]
    (worker,) = found["workers"]
    assert worker["faults"] == {"none": 2}
    (note,) = worker["messages"]
    assert (note["message"], note["is_own"]) == ("Update, please.", True)
    assert found["settings"] == {"username": "Ada", "contact": None, "public_workers": False}
    assert (found["id"], found["is_deleted"]) == (user_id, False)
    client.delete(f"/api/v2/users/{user_id}", headers=headers)
    assert client.get("/account/overview", headers=headers).json["is_deleted"] is True


def test_the_account_takes_three_statements(client: FlaskClient) -> None:
    _, key = make_user()
    client.get("/account/overview", headers={"apikey": key})
    with transaction() as session:
        count = count_statements(
            session, lambda: client.get("/account/overview", headers={"apikey": key})
        )
    assert count <= 3


def test_a_new_key_ends_the_old_one(client: FlaskClient) -> None:
    _, key = make_user()
    made = client.post("/account/key", headers={"apikey": key}).json["api_key"]
    assert client.get("/account/overview", headers={"apikey": made}).status_code == 200
    refused = client.get("/account/overview", headers={"apikey": key})
    assert (refused.status_code, refused.json["rc"]) == (401, "InvalidAPIKey")


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 400), ({"apikey": "x"}, 401), ({"apikey": ANONYMOUS_KEY}, 403)]
)
def test_an_account_is_of_whoever_has_its_key(
    client: FlaskClient, headers: dict[str, str], status: int
) -> None:
    for method, path in (("GET", "/account/overview"), ("POST", "/account/key")):
        answer = client.open(path, method=method, headers=headers)
        assert (answer.status_code, answer.mimetype) == (status, "application/json")
