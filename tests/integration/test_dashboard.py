# SPDX-License-Identifier: AGPL-3.0-or-later
"""The operator's dashboard: who sees it, what it shows, and what it costs."""

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import text
from sqlalchemy.orm import Session

from devtools.services import ServiceAddresses
from horde import tally
from horde.actions import dashboard
from horde.app import RESOURCE_MODULES
from horde.classes.base.kudos import Account, EntryType, KudosPosting
from horde.classes.base.user import UserRoleTypes
from horde.clock import utcnow
from horde.database import caches, figures
from horde.db import reading, run_transaction, transaction
from tests.integration.rows import (
    empty_tables,
    forget_everything,
    make_job,
    make_request,
    make_user,
    make_worker,
    own_horde,
)
from tests.integration.statements import count_statements


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "dashboard", RESOURCE_MODULES) as app:
        yield app


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    forget_everything()
    tally.take()
    empty_tables("horde_figures")
    return app.test_client()


@pytest.fixture(scope="module")
def moderator(app: Flask) -> dict[str, str]:
    _, key = make_user(UserRoleTypes.MODERATOR)
    return {"apikey": key}


@pytest.mark.parametrize("path", ["/dashboard/moment", "/dashboard/series"])
def test_the_figures_are_for_moderators(
    client: FlaskClient, moderator: dict[str, str], path: str
) -> None:
    _, key = make_user()
    answers = [client.get(path, headers=headers) for headers in ({}, {"apikey": "x"})]
    assert [answer.status_code for answer in answers] == [400, 401]
    refused = client.get(path, headers={"apikey": key})
    assert (refused.status_code, refused.json["rc"]) == (403, "NotModerator")
    shown = client.get(path, headers=moderator)
    assert (shown.status_code, shown.headers["Cache-Control"]) == (200, "private, no-store")
    assert moderator["apikey"] not in shown.text


def test_the_moment_shows_the_queue_by_model_and_class(
    client: FlaskClient, moderator: dict[str, str]
) -> None:
    owner, _ = make_user(username="Ada")
    worker_id = make_worker(owner, ("a/model",))
    make_request(owner, ("a/model",))
    make_job(make_request(owner, ("a/model",), n=2), worker_id)
    found = client.get("/dashboard/moment", headers=moderator).json
    (line,) = found["queue"]
    assert (line["model"], line["is_chat"], line["processing"]) == ("a/model", False, 1)
    assert line["waiting"] >= 2
    (worker,) = found["workers"]
    assert (worker["id"], worker["owner"]) == (str(worker_id), f"Ada#{owner}")
    assert (worker["processing"], worker["models"]) == (1, ["a/model"])
    assert found["worker_counts"]["online"] == 1
    assert found["redis"]["is_reachable"] is True
    assert found["database"]["max_connections"] > 0


def test_a_fault_is_shown_by_its_reason_at_its_worker(
    client: FlaskClient, moderator: dict[str, str]
) -> None:
    owner, key = make_user()
    worker_id = make_worker(owner, ("a/model",))
    job_id = make_job(make_request(owner, ("a/model",)), worker_id)
    body = {"id": str(job_id), "generation": "", "state": "faulted"}
    submitted = client.post("/api/v2/generate/text/submit", json=body, headers={"apikey": key})
    assert submitted.status_code == 200, submitted.text
    dashboard.store_tally()
    dashboard.store_tally()  # counts once
    (worker,) = client.get("/dashboard/moment", headers=moderator).json["workers"]
    assert worker["faults"] == {"none": 1}


def test_refusals_and_waits_become_series(client: FlaskClient, moderator: dict[str, str]) -> None:
    assert client.get("/api/v2/users/nobody").status_code == 404
    tally.count_seconds(tally.WAIT, 4)
    tally.count(tally.DONE, 3)
    dashboard.store_tally()
    dashboard.measure_horde()
    move_figures_back(timedelta(minutes=2))
    for window, share in (("hour", 1), ("day", 10)):
        if window == "day":
            move_figures_back(timedelta(minutes=20))
        found = client.get(f"/dashboard/series?window={window}", headers=moderator).json
        assert found["refusals"] == {"UserNotFound": 1}
        series = {name: max_of(values) for name, values in found["series"].items()}
        assert series["done"] == pytest.approx(3 / share)
        assert series["wait_50"] == pytest.approx(4)
        assert series["waiting"] == 0
        assert len(found["at"]) == (60 if window == "hour" else 144)
        caches.clear_all()
    unknown = client.get("/dashboard/series?window=year", headers=moderator)
    assert unknown.status_code == 400


def move_figures_back(span: timedelta) -> None:
    """Have what is stored happen earlier: the running minute is not shown."""
    with transaction() as session:
        session.execute(text("UPDATE horde_figures SET minute = minute - :span"), {"span": span})


def max_of(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def test_each_posting_counts_once_as_kudos_that_moved(
    client: FlaskClient, moderator: dict[str, str]
) -> None:
    user_id, _ = make_user()

    def post(amount: str) -> None:
        def work(session: Session) -> None:
            request_id = make_request(user_id)
            session.add(
                KudosPosting(
                    event_id=request_id,
                    entry_type=EntryType.GENERATION,
                    user_id=user_id,
                    account=Account.BALANCE,
                    amount=Decimal(amount),
                    created=utcnow(),
                    applied=True,
                )
            )

        run_transaction(work)

    post("100")
    dashboard.measure_horde()  # begins here
    post("5.50")
    post("-2")
    dashboard.measure_horde()
    dashboard.measure_horde()
    with reading() as session:
        rows = session.execute(text("SELECT name, sum(amount) FROM horde_figures GROUP BY name"))
        found = dict(rows.all())
    assert found["spent.GENERATION"] == 2
    assert found["gained.GENERATION"] in (5.5, 105.5)  # with the posting it begins at
    assert found["unfolded"] == 0


def test_figures_of_yesterday_are_dropped_and_two_processes_add_up(client: FlaskClient) -> None:
    now = utcnow()
    with transaction() as session:
        figures.add_figures(session, {"done": 2, "a": 1}, now)
        figures.add_figures(session, {"done": 3}, now)
        figures.add_figures(session, {"done": 1}, now - figures.KEPT - timedelta(minutes=1))
        figures.prune(session, now)
        rows = dict(session.execute(text("SELECT name, amount FROM horde_figures")).all())
    assert rows == {"done": 5, "a": 1}


def test_what_could_not_be_stored_is_stored_later(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally.count(tally.DONE)
    with monkeypatch.context() as patch:
        patch.setattr(figures, "add_figures", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dashboard.store_tally()
    dashboard.store_tally()
    with reading() as session:
        assert session.scalar(text("SELECT amount FROM horde_figures WHERE name = 'done'")) == 1


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/moment", "/dashboard/series"])
def test_a_view_takes_three_statements_and_the_next_one_none(
    client: FlaskClient, moderator: dict[str, str], path: str
) -> None:
    client.get("/api/v2/find_user", headers=moderator)  # who the key belongs to is kept
    for most in (3, 0):
        with transaction() as session:
            count = count_statements(session, lambda: client.get(path, headers=moderator))
        assert count <= most


def test_a_worker_that_is_gone_takes_its_faults_along(client: FlaskClient) -> None:
    owner, _ = make_user()
    worker_id = make_worker(owner)
    tally.count_fault(worker_id, "none")
    with transaction() as session:
        session.execute(text("DELETE FROM workers"))
    dashboard.store_tally()
    with reading() as session:
        assert session.scalar(text("SELECT count(*) FROM worker_faults")) == 0
