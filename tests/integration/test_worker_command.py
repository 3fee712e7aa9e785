# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde worker`: what an operator sees and does of workers."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.base.user import UserRoleTypes
from horde.classes.kobold.worker import TextWorker
from horde.cli import main as command
from horde.database import users
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import forget_everything, make_user, make_worker

type Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "worker_command") as api:
        yield api


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    return module_api


@pytest.fixture
def run(api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: its exit code and what it printed."""
    config = api.app.extensions[CONFIG_EXTENSION]
    connected = db.state.get()
    monkeypatch.setenv("DATABASE_URL", config.database_url)
    monkeypatch.setenv("REDIS_URL", config.redis_url)

    def run_command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = command.main(("worker", *arguments))
        db.disconnect()
        db.state.set(connected)
        redis_ctrl.connect(config)
        users.configure(config)
        printed = capsys.readouterr()
        return code, printed.out if code == 0 else printed.err

    return run_command


def read(run: Run, *arguments: str) -> Any:
    code, printed = run(*arguments, "--json")
    assert code == 0, printed
    return json.loads(printed)


def get_worker(name: str) -> TextWorker:
    with transaction() as session:
        worker = session.scalars(select(TextWorker).where(TextWorker.name == name)).one()
        session.expunge(worker)
    return worker


def test_workers_are_listed_and_shown_with_all_that_moderators_see(api: Api, run: Run) -> None:
    user_id, _ = make_user()
    worker_id = make_worker(user_id, name="worker one", ipaddr="198.51.100.7", paused=True)
    [listed] = read(run, "list")
    assert (listed["id"], listed["paused"], listed["ipaddr"]) == (
        str(worker_id),
        True,
        "198.51.100.7",
    )
    code, table = run("list")
    assert (code, "paused" in table, f"#{user_id}" in table) == (0, True, True)
    assert read(run, "show", "worker one")["id"] == str(worker_id)
    assert read(run, "show", str(worker_id))["name"] == "worker one"


def test_a_worker_is_paused_and_put_into_maintenance_and_each_act_is_recorded(
    api: Api, run: Run
) -> None:
    make_worker(make_user()[0], name="worker one")
    assert read(run, "pause", "worker one", "--reason", "odd replies")["paused"] is True
    assert get_worker("worker one").paused
    assert read(run, "resume", "worker one")["paused"] is False
    changed = read(run, "maintenance", "worker one", "--message", "Please update.")
    assert (changed["maintenance"], changed["maintenance_msg"]) == (True, "Please update.")
    assert get_worker("worker one").maintenance
    assert read(run, "serve", "worker one")["maintenance"] is False
    acts = api.list_acts(make_moderator()[1], action="worker.changed")
    assert [act["username"] for act in acts] == ["operator"] * 4
    assert acts[-1]["reason"] == "odd replies"
    assert run("delete", "worker one")[0] == 0
    code, printed = run("show", "worker one")
    assert (code, printed.count("\n")) == (1, 1)


def test_an_operator_writes_to_workers_a_kind_and_all(api: Api, run: Run) -> None:
    user_id, key = make_user(UserRoleTypes.TRUSTED)
    for name in ("worker one", "worker two"):
        make_worker(user_id, name=name)
    both = ("--worker", "worker one", "--worker", "worker two")
    assert len(read(run, "message", "to both", *both, "--hours", "1")["ids"]) == 2
    read(run, "message", "to text", "--type", "text", "--origin", "The operator")
    assert read(run, "message", "to all")["origin"] == "AI Horde Moderators"
    pop = {"name": "worker one", "models": ["a/model"]}
    told = api.post("/generate/text/pop", pop, key).json["messages"]
    assert [message["message"] for message in told] == ["to all", "to text", "to both"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nobody"),
        ("pause", "00000000-0000-0000-0000-000000000000"),
        ("message", "hi", "--worker", "nobody"),
        ("message", "hi", "--hours", "0"),
        ("message", "", "--type", "text"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_1(
    run: Run, arguments: tuple[str, ...]
) -> None:
    code, printed = run(*arguments)
    assert code == 1
    assert printed.startswith("horde worker: ")
    assert printed.count("\n") == 1
