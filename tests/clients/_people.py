# SPDX-License-Identifier: AGPL-3.0-or-later
"""The people who walk the pages of the API, and what one of them owns: markup is in all of it that
others can see, also where the API would have taken it out.
"""

from dataclasses import dataclass
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from tests.acceptance._stack import Account, Horde, wait_until
from tests.clients._browser import Visit, Visits

MARKUP = "<img src=x onerror=name=1>"
OWNED = f"Owned {MARKUP}"  # the name of all that the owner has
OWN_MODEL = f"owners/{MARKUP}"
REFUSED_PROMPT = f"gooseberry {MARKUP}"


@dataclass(frozen=True)
class People:
    """Who looks at the pages, and what the owner has."""

    url: str
    owner: Account
    moderator: Account
    worker_id: str
    team_id: str

    def call(self, account: Account, method: str, path: str, body: dict[str, Any]) -> Any:
        """The answer of a route of the API, which has to be good."""
        answer = self.send(account, method, path, body)
        answer.raise_for_status()
        return answer.json()

    def send(
        self, account: Account, method: str, path: str, body: dict[str, Any]
    ) -> httpx.Response:
        """The answer of a route of the API."""
        headers = {"apikey": account.key}
        return httpx.request(method, f"{self.url}/api/v2{path}", json=body, headers=headers)

    def ask(self) -> None:
        """A request of the owner for a model that takes no job here, so that it waits."""
        params = {"max_length": 16, "max_context_length": 1024}
        body = {"prompt": "x", "params": params, "models": [OWN_MODEL]}
        self.call(self.owner, "POST", "/generate/text/async", body)


def make_people(horde: Horde) -> People:
    """An owner whose worker, team, messages and shared key bear markup, a moderator, and evidence
    of a prompt of a flagged account, of which a rule leaves nothing.
    """
    owner, moderator, flagged = (horde.create_account(name) for name in ("Owner", "Mod", "Flagged"))
    horde.commands.require("user", "role", str(moderator.id), "moderator")
    people = People(horde.api.url.removesuffix("/api"), owner, moderator, "", "")
    pop = {"name": "Owned", "models": [OWN_MODEL], "max_length": 512}
    people.call(owner, "POST", "/generate/text/pop", pop | {"max_context_length": 2048})
    (worker_id,) = horde.database.rows("SELECT id FROM workers WHERE user_id = %s", owner.id)[0]
    team = people.call(owner, "POST", "/teams", {"name": "The night shift", "info": "By night"})
    people.call(owner, "PUT", f"/workers/{worker_id}", {"team": team["id"]})
    message = {"worker_id": str(worker_id), "message": MARKUP}
    people.call(moderator, "POST", "/workers/messages", message)
    people.call(owner, "PUT", "/sharedkeys", {"name": f"Key {MARKUP}", "kudos": 100, "expiry": 3})
    rules: dict[str, dict[str, Any]] = {
        MARKUP: {"filter_type": 20, "replacement": ""},
        ".*gooseberry.*": {"filter_type": 10, "replacement": ""},
    }
    for regex, rule in rules.items():
        body = {"regex": regex, "description": MARKUP, **rule}
        people.call(moderator, "PUT", "/filters", body)
    people.call(moderator, "PUT", f"/users/{flagged.id}", {"flagged": True})
    params = {"max_length": 16, "max_context_length": 1024}
    prompt = {"prompt": REFUSED_PROMPT, "params": params, "models": [OWN_MODEL]}
    # A process knows a rule ten seconds after it was made at the latest.
    wait_until(
        lambda: people.send(flagged, "POST", "/generate/text/async", prompt).status_code == 400
    )
    for statement, row in (
        ("UPDATE users SET username = %s, contact = %s WHERE id = %s", owner.id),
        ("UPDATE workers SET name = %s, info = %s WHERE id = %s", worker_id),
        ("UPDATE teams SET name = %s, info = %s WHERE id = %s", team["id"]),
    ):
        horde.database.rows(statement, OWNED, MARKUP, row)
    online = "UPDATE workers SET last_check_in = last_check_in + interval '1 hour' WHERE id = %s"
    horde.database.rows(online, worker_id)
    owner = Account(owner.id, f"{OWNED}#{owner.id}", owner.key)
    return People(people.url, owner, moderator, str(worker_id), team["id"])


def open_with_key(visits: Visits, people: People, path: str, key: str, **options: Any) -> Visit:
    """A page whose key was typed in and accepted."""
    visit = visits.open(f"{people.url}{path}", **options)
    visit.page.fill("#key", key)
    visit.page.press("#key", "Enter")
    expect(visit.page.locator("#signed-in")).to_be_visible()
    expect(visit.page.locator("#sign-out")).to_be_visible()
    return visit


def open_account(visits: Visits, people: People, *, is_paused: bool = False) -> Page:
    """The owner's account."""
    visit = open_with_key(visits, people, "/account", people.owner.key)
    expect(visit.page.locator("#workers article")).to_have_count(1)
    if is_paused:
        visit.pause()
    return visit.page


def open_dashboard(visits: Visits, people: People, *, is_paused: bool = False) -> Page:
    """The dashboard with everything read."""
    visit = open_with_key(visits, people, "/dashboard", people.moderator.key)
    expect(visit.page.locator("#plots canvas").first).to_be_visible()
    expect(visit.page.locator("#workers")).to_contain_text(OWNED)
    if is_paused:
        visit.pause()
    return visit.page
