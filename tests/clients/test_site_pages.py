# SPDX-License-Identifier: AGPL-3.0-or-later
"""The site, the account, the dashboard and the API page in a real browser, against a whole horde:
as a newcomer, the owner of an account and of a worker, and a moderator walk them.
"""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.acceptance._stack import Account
from tests.clients._browser import (
    LAPTOP,
    VIEWS,
    Scheme,
    View,
    Visit,
    Visits,
    fits_in_width,
    list_barriers,
)
from tests.clients._worker import MODEL
from tests.clients.conftest import Stack

MARKUP = "<img src=x onerror=name=1>"
OWN_MODEL = f"owners/{MARKUP}"
OPEN_PAGES = (
    *("/", f"/models/{MODEL}", "/workers", "/teams", "/leaders", "/news", "/register"),
    *("/terms", "/privacy", "/sponsors", "/api/"),
)
LOOKS = ((LAPTOP, "light"), (VIEWS["narrow"], "dark"))
KEYED_PAGES = ("/account", "/dashboard")


@dataclass(frozen=True)
class People:
    """Who looks at the pages, and what one of them owns: markup is in all that others can see."""

    url: str
    owner: Account
    moderator: Account
    worker_id: str
    team_id: str

    def call(self, account: Account, method: str, path: str, body: dict[str, Any]) -> Any:
        """The answer of a route of the API, which has to be good."""
        headers = {"apikey": account.key}
        answer = httpx.request(method, f"{self.url}/api/v2{path}", json=body, headers=headers)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="module")
def people(stack: Stack) -> People:
    """An owner whose worker, team, messages and shared key bear markup, and a moderator."""
    horde = stack.horde
    owner, moderator = (horde.create_account(name) for name in (f"A {MARKUP}", "Mod"))
    horde.commands.require("user", "role", str(moderator.id), "moderator")
    people = People(horde.api.url.removesuffix("/api"), owner, moderator, "", "")
    pop = {"name": f"Owned {MARKUP}", "models": [OWN_MODEL], "max_length": 512}
    people.call(owner, "POST", "/generate/text/pop", pop | {"max_context_length": 2048})
    (worker_id,) = horde.database.rows("SELECT id FROM workers WHERE user_id = %s", owner.id)[0]
    team = people.call(owner, "POST", "/teams", {"name": "The night shift", "info": "By night"})
    change = {"info": MARKUP, "team": team["id"]}
    people.call(owner, "PUT", f"/workers/{worker_id}", change)
    message = {"worker_id": str(worker_id), "message": MARKUP}
    people.call(moderator, "POST", "/workers/messages", message)
    people.call(owner, "PUT", "/sharedkeys", {"name": f"Key {MARKUP}", "kudos": 100, "expiry": 3})
    rule = {"regex": MARKUP, "filter_type": 10, "description": MARKUP}
    people.call(moderator, "PUT", "/filters", rule)
    return People(people.url, owner, moderator, str(worker_id), team["id"])


def open_with_key(visits: Visits, people: People, path: str, key: str, **options: Any) -> Visit:
    """A page whose key was typed in and accepted."""
    visit = visits.open(f"{people.url}{path}", **options)
    visit.page.fill("#key", key)
    visit.page.press("#key", "Enter")
    expect(visit.page.locator("#signed-in")).to_be_visible()
    expect(visit.page.locator("#sign-out")).to_be_visible()
    return visit


def open_account(visits: Visits, people: People, **options: Any) -> Page:
    """The owner's account."""
    return open_with_key(visits, people, "/account", people.owner.key, **options).page


def open_dashboard(visits: Visits, people: People, **options: Any) -> Page:
    """The dashboard with everything read."""
    page = open_with_key(visits, people, "/dashboard", people.moderator.key, **options).page
    expect(page.locator("#plots canvas").first).to_be_visible()
    expect(page.locator("#workers")).to_contain_text("Owned")
    return page


def check_page(page: Page, axe: str) -> None:
    """A page fits, has no barrier, and shows no markup of others as such."""
    assert fits_in_width(page), page.url
    assert list_barriers(page, axe) == [], page.url
    assert page.locator("img").count() == 0, page.url
    assert page.title() != "1"


@pytest.mark.parametrize(("view", "scheme"), LOOKS)
def test_a_page_for_everybody_fits_the_screen_and_has_no_barrier(
    visits: Visits, people: People, view: View, scheme: Scheme, axe: str
) -> None:
    visit = visits.open(f"{people.url}/", view=view, scheme=scheme)
    for path in (*OPEN_PAGES, f"/teams/{people.team_id}", *KEYED_PAGES):
        visit.page.goto(f"{people.url}{path}")
        check_page(visit.page, axe)


@pytest.mark.parametrize(("view", "scheme"), LOOKS)
def test_the_account_fits_the_screen_and_has_no_barrier(
    visits: Visits, people: People, view: View, scheme: Scheme, axe: str
) -> None:
    page = open_account(visits, people, view=view, scheme=scheme)
    expect(page.locator("#workers article")).to_have_count(1)
    check_page(page, axe)


@pytest.mark.parametrize(("view", "scheme"), LOOKS)
def test_the_dashboard_fits_the_screen_and_has_no_barrier(
    visits: Visits, people: People, view: View, scheme: Scheme, axe: str
) -> None:
    page = open_dashboard(visits, people, view=view, scheme=scheme)
    for summary in page.locator("details > summary").all():
        summary.click()
    expect(page.locator("#filters")).to_contain_text("onerror")
    expect(page.locator("#acts")).to_contain_text("filter.added")
    check_page(page, axe)


# A newcomer


def test_a_newcomer_makes_an_account_by_keyboard_and_opens_it(
    visits: Visits, people: People
) -> None:
    page = visits.open(f"{people.url}/").page
    page.get_by_role("link", name="Create an account").press("Enter")
    page.get_by_label("Name").fill("Newcomer")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Newcomer#")
    key = page.locator(".key").inner_text()
    page.get_by_role("link", name="Open your account").press("Enter")
    page.get_by_label("Your key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#alias")).to_contain_text("Newcomer#")
    assert key not in page.url
    page.reload()
    expect(page.locator("#alias")).to_contain_text("Newcomer#")  # the tab keeps the key
    page.get_by_role("button", name="Sign out").press("Enter")
    expect(page.get_by_label("Your key")).to_be_visible()


def test_a_wrong_key_is_told_so_and_nothing_is_shown(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/account").page
    for key, words in (("nobody-has-it", "No account has this key."), ("ключ", "no key has")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        expect(page.locator("#login-problem")).to_contain_text(words)
    expect(page.locator("#signed-in")).to_be_hidden()


def test_commands_name_the_host_they_were_read_at(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/").page
    expect(page.locator(".copy pre").first).to_contain_text(f"{people.url}/api/v2/generate/chat")


# The owner of an account and a worker


def test_an_owner_makes_changes_and_revokes_a_shared_key(visits: Visits, people: People) -> None:
    page = open_account(visits, people)
    page.fill("#share-name", "For a friend")
    page.press("#share-name", "Enter")
    row = page.locator("#shared tr", has_text="For a friend")
    expect(row).to_contain_text("1,000")
    row.get_by_role("button", name="Change").click()
    page.fill("#share-kudos", "77")
    page.press("#share-kudos", "Enter")
    expect(row).to_contain_text("77")
    row.get_by_role("button", name="Revoke").click()
    row.get_by_role("button", name="Revoke").click()  # it asks once
    expect(row).to_have_count(0)


def test_an_owner_gives_kudos_and_cancels_a_request(visits: Visits, people: People) -> None:
    asked = {"prompt": "x", "params": {"max_length": 16}, "models": [OWN_MODEL]}
    people.call(people.owner, "POST", "/generate/text/async", asked)
    page = open_account(visits, people)
    page.fill("#transfer-to", people.moderator.alias)
    page.fill("#transfer-amount", "5")
    page.press("#transfer-amount", "Enter")
    expect(page.locator("#said")).to_contain_text("5 kudos were given")
    page.fill("#transfer-to", "nobody#999999")
    page.press("#transfer-to", "Enter")
    expect(page.locator("#said.problem")).to_be_visible()
    page.get_by_role("button", name="Cancel request").first.click()
    expect(page.locator("#requests")).to_contain_text("Nothing of yours waits or runs.")


def test_an_owner_deletes_an_account_takes_that_back_and_gets_a_new_key(
    visits: Visits, people: People, stack: Stack
) -> None:
    account = stack.horde.create_account("Leaver")
    page = open_with_key(visits, people, "/account", account.key).page
    page.get_by_role("button", name="Delete the account").click()
    page.get_by_role("button", name="Really delete the account").click()
    page.get_by_role("button", name="Keep the account").click()
    expect(page.get_by_role("button", name="Delete the account")).to_be_visible()
    page.get_by_role("button", name="Make a new key").click()
    page.get_by_role("button", name="Really: the old key stops working").click()
    made = page.locator("#new-key-text")
    expect(made).not_to_have_text("")
    assert made.inner_text() != account.key
    page.reload()
    expect(page.locator("#alias")).to_contain_text("Leaver#")


def test_no_address_that_a_page_asks_for_holds_the_key(visits: Visits, people: People) -> None:
    for path, account in (("/account", people.owner), ("/dashboard", people.moderator)):
        visit = open_with_key(visits, people, path, account.key)
        assert len(visit.addresses) > 4
        assert not [address for address in visit.addresses if account.key in address]


# A moderator


def test_a_moderator_sees_figures_and_changes_modes_users_and_blocks(
    visits: Visits, people: People
) -> None:
    page = open_dashboard(visits, people)
    for part in ("Database", "Redis", "Store", "Leader"):
        expect(page.locator("#health")).to_contain_text(part)
    page.get_by_role("button", name="Day").click()
    expect(page.get_by_role("button", name="Day")).to_have_attribute("aria-pressed", "true")
    page.locator("summary", has_text="Modes").click()
    page.get_by_label("New workers need an invitation").check()
    expect(page.locator("#said")).to_have_text("The mode was set.")
    page.get_by_label("New workers need an invitation").uncheck()
    page.locator("summary", has_text="Users").click()
    page.fill("#user-search", people.owner.alias)
    page.press("#user-search", "Enter")
    expect(page.locator("#user-name")).to_have_text(people.owner.alias)
    page.fill("#user-invited", "3")
    page.press("#user-invited", "Enter")
    expect(page.locator("#said")).to_have_text("The account was changed.")
    page.locator("summary", has_text="Blocks").click()
    page.fill("#block-address", "198.51.100.0/24")
    page.press("#block-address", "Enter")
    expect(page.locator("#blocks")).to_contain_text("198.51.100.0/24")
    page.get_by_role("button", name="Lift the block of 198.51.100.0/24").click()
    expect(page.locator("#blocks")).not_to_contain_text("198.51.100.0/24")


def test_the_dashboard_is_for_moderators(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/dashboard").page
    page.fill("#key", people.owner.key)
    page.press("#key", "Enter")
    expect(page.locator("#login-problem")).to_contain_text("Only a moderator can do this.")


# The API page


def test_an_example_of_the_api_page_works_as_it_is_sent(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/api/#post_chat_async_generate", view=LAPTOP).page
    operation = page.locator("#post_chat_async_generate")
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".state")).to_contain_text("202")
    expect(operation.locator(".answer")).to_contain_text('"id"')
    page.fill("#search", "heartbeat")
    expect(page.locator(".operation:visible")).to_have_count(1)
    page.locator("#get_heartbeat summary").first.click()
    page.locator("#get_heartbeat").get_by_role("button", name="Send").click()
    expect(page.locator("#get_heartbeat .answer")).to_contain_text('"OK"')


def test_a_command_of_the_api_page_holds_no_key(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/api/#get_find_user").page
    page.fill("#key", people.owner.key)
    page.press("#key", "Tab")
    operation = page.locator("#get_find_user")
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".answer")).to_contain_text(people.owner.alias)
    operation.locator("summary", has_text="As a command").click()
    expect(operation.locator("details pre")).to_contain_text("apikey: KEY")
