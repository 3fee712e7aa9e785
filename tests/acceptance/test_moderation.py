# SPDX-License-Identifier: AGPL-3.0-or-later
"""A day of a moderator, through HTTP and through the command line, on a horde of processes."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from tests.acceptance._stack import (
    Account,
    Answer,
    Horde,
    ScriptedWorker,
    build_shared_environment,
    running_horde,
    wait_until,
)

pytestmark = pytest.mark.slow

MODEL = "tests/moderated"
EVIDENCE = "/operations/moderation/prompts"
NOTHING_LEFT = "... ?!"  # once it is screened
ADULT = (
    "KoboldAI/LLaMA2-13B-Tiefighter"  # marked nsfw in the reference, so its prompts are screened
)


@pytest.fixture(scope="module")
def horde(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Horde]:
    """The API with two processes, as `ADMINS` has no say in any of this."""
    services = build_shared_environment(service_urls, "acceptance_moderation")
    with running_horde(services, tmp_path_factory.mktemp("moderation")) as horde:
        yield horde


def make_moderator(horde: Horde, name: str) -> Account:
    account = horde.create_account(name)
    horde.commands.require("user", "role", account.alias, "moderator")
    return account


class Desk:
    """A moderator's calls."""

    def __init__(self, horde: Horde, key: str) -> None:
        self._http, self._key = horde.api.http, key

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The body of an answer that has to be 200."""
        answer = self._http.request(method, path, json=body, headers={"apikey": self._key})
        assert answer.status_code == 200, answer.text
        return answer.json()


def ask(horde: Horde, asker: Account, prompt: str, model: str) -> Answer:
    return horde.api.post("/generate/text/async", {"prompt": prompt, "models": [model]}, asker.key)


def wait_for_evidence(
    horde: Horde, asker: Account, read: Callable[[], list[dict[str, Any]]]
) -> dict[str, Any]:
    """The event of a prompt that is refused now, once its text is stored."""
    horde.commands.require("user", "role", asker.alias, "flagged")

    def is_refused() -> bool:
        answer = ask(horde, asker, NOTHING_LEFT, MODEL)
        return bool(answer.json().get("rc") == "CorruptPrompt")

    wait_until(is_refused)
    horde.commands.require("user", "role", asker.alias, "flagged", "--remove")
    wait_until(lambda: read()[-1]["text"] == "stored", 20)
    return read()[-1]


def list_acts(desk: Desk, user_id: int) -> list[dict[str, Any]]:
    """All pages of what an account did, the newest first."""
    path = f"/operations/moderator_acts?user_id={user_id}"
    pages = (desk.call("GET", f"{path}&page={number}") for number in itertools.count(1))
    return [act for page in itertools.takewhile(bool, pages) for act in page]


def is_reading(act: dict[str, Any]) -> bool:
    """Reading is recorded as often as it is done."""
    return bool(act["action"] == "evidence.read")


def read_prompt(horde: Horde, request_id: str) -> str:
    return str(horde.database.value("SELECT prompt FROM waiting_prompts WHERE id = %s", request_id))


def serve_one(horde: Horde, asker: Account, worker: ScriptedWorker) -> dict[str, Any]:
    """Let a worker be offered a request; the job."""
    horde.api.queue_text(asker.key, worker.model)
    return worker.require_job()


def test_a_moderators_day_through_http(horde: Horde) -> None:
    moderator = make_moderator(horde, "day moderator")
    asker, giver = horde.create_account("day asker"), horde.create_account("day giver")
    owner = horde.create_account("day owner", is_trusted=False)
    desk = Desk(horde, moderator.key)
    worker = ScriptedWorker(horde.api, owner.key, "day worker", f"{MODEL}-http")

    # An address is refused, and admitted again.
    blocked = {"ipaddr": "127.0.0.1", "hours": 1, "reason": "a flood"}
    assert desk.call("POST", "/operations/ipaddr", blocked) == {"message": "OK"}
    answer = ask(horde, asker, "Once", MODEL)
    assert (answer.status_code, answer.json()["rc"]) == (403, "TimeoutIP")
    assert desk.call("GET", "/operations/ipaddr/127.0.0.1")[0]["ipaddr"] == "127.0.0.1"
    desk.call("DELETE", "/operations/ipaddr", {"ipaddr": "127.0.0.1"})
    assert ask(horde, asker, "Once", MODEL).status_code == 202

    # A rule rewrites what it should, in every process within its time.
    rule = {"regex": "secret http club", "filter_type": 10, "replacement": "library"}
    filter_id = desk.call("PUT", "/filters", rule)["id"]
    assert desk.call("POST", "/filters", {"prompt": "the secret http club"})["suspicion"] == 1

    def is_rewritten() -> bool:
        queued = ask(horde, asker, "the secret http club", ADULT)
        return "library" in read_prompt(horde, queued.json()["id"])

    wait_until(is_rewritten, 20)
    desk.call("DELETE", f"/filters/{filter_id}")

    # What was refused is read, once it lies in the store, and noted on.
    event = wait_for_evidence(
        horde, asker, lambda: desk.call("GET", f"{EVIDENCE}?user_id={asker.id}")
    )
    assert event["prompts"]["submitted"] == NOTHING_LEFT
    note = desk.call("POST", f"{EVIDENCE}/{event['id']}/notes", {"note": "Only dots."})
    assert desk.call("GET", f"{EVIDENCE}?event_id={event['id']}")[0]["notes"] == [note]

    # A worker that cheats is paused: it gets fakes that earn nothing. Its owner is written to.
    worker.submit(serve_one(horde, asker, worker))
    shown = desk.call("GET", "/workers/name/day%20worker")
    desk.call("PUT", f"/workers/{shown['id']}", {"paused": True, "reason": "copied replies"})
    paid = horde.count_payments(owner)
    worker.submit(serve_one(horde, asker, worker))
    assert horde.count_payments(owner) == paid
    note = {"worker_id": shown["id"], "message": "Please write to us."}
    desk.call("POST", "/workers/messages", note)
    told = worker.post_pop().json()["messages"]
    assert [message["message"] for message in told] == ["Please write to us."]

    # Kudos are given, and an account is deleted.
    gift = {"username": asker.alias, "amount": 500}
    given = horde.api.post("/kudos/transfer", gift, giver.key)
    assert given.json() == {"transferred": 500}
    desk.call("DELETE", f"/users/{owner.id}?reason=asked+by+mail")
    assert desk.call("GET", f"/users/{owner.id}")["deleted"] is True
    assert worker.post_pop().json()["rc"] == "DeletedUser"

    # All of it is on record.
    acts = list_acts(desk, moderator.id)
    assert [(act["action"], act["reason"]) for act in reversed(acts) if not is_reading(act)] == [
        ("address.blocked", "a flood"),
        ("address.unblocked", None),
        ("filter.added", None),
        ("filter.deleted", None),
        ("evidence.noted", None),
        ("worker.changed", "copied replies"),
        ("message.posted", None),
        ("user.marked_for_deletion", "asked by mail"),
    ]
    assert horde.audit()["discrepancies"] == []


def test_a_moderators_day_at_the_command_line(horde: Horde) -> None:
    asker, giver = horde.create_account("line asker"), horde.create_account("line giver")
    owner = horde.create_account("line owner", is_trusted=False)
    worker = ScriptedWorker(horde.api, owner.key, "line worker", f"{MODEL}-line")

    def run(*words: str) -> Any:
        return json.loads(horde.commands.require(*words, "--json"))

    run("block", "add", "127.0.0.1", "--hours", "1", "--reason", "a line flood")
    answer = ask(horde, asker, "Once", MODEL)
    assert (answer.status_code, answer.json()["rc"]) == (403, "TimeoutIP")
    assert run("block", "show", "127.0.0.1")[0]["ipaddr"] == "127.0.0.1"
    assert run("block", "remove", "127.0.0.1") == []
    run("block", "add", "198.51.100.0/24")
    assert [each["ipaddr"] for each in run("block", "list")] == ["198.51.100.0/24"]
    run("block", "remove", "198.51.100.0/24")

    rule = run("filter", "add", "secret line club", "--type", "10", "--replacement", "library")
    assert [each["id"] for each in run("filter", "list")] == [rule["id"]]

    def is_rewritten() -> bool:
        queued = ask(horde, asker, "the secret line club", ADULT)
        return "library" in read_prompt(horde, queued.json()["id"])

    wait_until(is_rewritten, 20)
    changed = run("filter", "change", rule["id"], "--regex", "other")
    assert changed["regex"] == "other"
    assert run("filter", "remove", rule["id"]) == {"message": "OK"}

    event = wait_for_evidence(
        horde, asker, lambda: run("evidence", "list", "--user", str(asker.id))
    )
    assert run("evidence", "list", "--address", "127.0.0.1", "--limit", "1") == [event]
    run("evidence", "note", str(event["id"]), "Only dots.")
    shown = run("evidence", "show", str(event["id"]))
    assert [note["username"] for note in shown["notes"]] == ["operator"]
    assert shown["prompts"]["submitted"] == NOTHING_LEFT

    worker.submit(serve_one(horde, asker, worker))
    assert run("worker", "pause", "line worker", "--reason", "copied replies")["paused"] is True
    paid = horde.count_payments(owner)

    def is_faked() -> bool:
        before = horde.count_payments(owner)
        worker.submit(serve_one(horde, asker, worker))
        return horde.count_payments(owner) == before

    wait_until(is_faked)
    assert horde.count_payments(owner) <= paid + 1
    run("worker", "message", "Please write to us.", "--worker", "line worker")
    told = worker.post_pop().json()["messages"]
    assert "Please write to us." in [message["message"] for message in told]
    assert run("worker", "resume", "line worker")["paused"] is False

    moved = run("kudos", "move", giver.alias, asker.alias, "500", "--reason", "lost a bet")
    assert moved == {"transferred": 500}
    assert run("user", "delete", owner.alias, "--reason", "asked")["message"] == "OK"
    assert run("user", "show", owner.alias)["roles"] == ["deleted"]

    modes = run("mode", "--raid", "on", "--reason", "a raid")
    assert modes == {"maintenance_mode": False, "invite_only_mode": False, "raid_mode": True}
    assert run("mode", "--raid", "off")["raid_mode"] is False

    acts = run("acts", "--subject", f"user {giver.id}")
    assert [(act["action"], act["username"], act["reason"]) for act in acts] == [
        ("kudos.moved", "operator", "lost a bet")
    ]
    assert horde.audit()["discrepancies"] == []


@pytest.mark.parametrize(
    "words",
    [
        ("block", "add", "nowhere"),
        ("filter", "add", "(", "--type", "10"),
        ("filter", "remove", "999999"),
        ("evidence", "show", "999999"),
        ("evidence", "list", "--address", "nowhere"),
        ("worker", "pause", "no such worker"),
        ("kudos", "move", "nobody#1", "nobody#2", "5"),
        ("user", "delete", "nobody#1"),
    ],
)
def test_a_word_that_cannot_be_followed_says_so_and_ends_with_1(
    horde: Horde, words: tuple[str, ...]
) -> None:
    assert horde.commands.run(*words) == (1, "")


def test_a_lost_key_is_replaced_by_the_operator(horde: Horde) -> None:
    account = horde.create_account("forgetful")
    made = json.loads(horde.commands.require("user", "key", account.alias))
    found = horde.api.http.get("/find_user", headers={"apikey": made["api_key"]})
    assert found.json()["username"] == account.alias

    def is_ended() -> bool:
        old = horde.api.http.get("/find_user", headers={"apikey": account.key})
        return bool(old.status_code == 404)

    wait_until(is_ended)


@pytest.mark.parametrize(
    "words", [("block", "list"), ("filter", "list"), ("mode",), ("acts",), ("evidence", "list")]
)
def test_without_json_a_word_prints_lines_for_people(horde: Horde, words: tuple[str, ...]) -> None:
    printed = horde.commands.require(*words)
    assert printed.strip()
    assert not printed.startswith(("[", "{"))
