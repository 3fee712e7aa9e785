# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages of the API by keyboard alone, as a newcomer, the owner of an account and of a worker,
and a moderator: Tab comes to all that a mouse can use, and the focus is never lost by an act.
"""

import pytest
from playwright.sync_api import Page, expect

from tests.clients._browser import Visits, get_focus, go_to, walk_by_keyboard
from tests.clients._people import MARKUP, OWNED, People, open_account, open_dashboard, open_with_key
from tests.clients._worker import MODEL
from tests.clients.conftest import Stack

OPEN_PAGES = (
    *("/", f"/models/{MODEL}", "/workers", "/teams", "/leaders", "/news", "/register", "/account"),
    *("/dashboard", "/terms", "/api/", "/acount"),
)
NAVIGATION = ["Workers", "Teams", "Leaders", "Register", "Account", "API"]


def act(page: Page, name: str, *, key: str = "Enter") -> None:
    """Go to something and use it."""
    go_to(page, name)
    page.keyboard.press(key)


def write(page: Page, name: str, text: str) -> None:
    """Go to a field and write, in place of what it held."""
    go_to(page, name)
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type(text)


def is_focus_in(page: Page, part: str) -> bool:
    """Whether something of a part has the focus, and shows it."""
    get_focus(page)
    is_there = "(part) => Boolean(focused.closest(part) ?? focused.querySelector(part))"
    return bool(page.evaluate(is_there.replace("focused", "document.activeElement"), part))


@pytest.mark.parametrize("path", OPEN_PAGES)
def test_tab_comes_to_all_of_a_page_in_its_order(visits: Visits, people: People, path: str) -> None:
    page = visits.open(f"{people.url}{path}").page
    names = walk_by_keyboard(page)
    assert names[0] == "To the content"
    assert names[2:8] == NAVIGATION
    assert names[-1] == "Operators"


def test_tab_comes_to_all_of_the_account_and_the_dashboard(visits: Visits, people: People) -> None:
    people.ask()
    account = open_account(visits, people, is_paused=True)
    names = walk_by_keyboard(account)
    parts = ["Sign out", "Give", "Create", "Save", "Make a new key", "Delete the account"]
    assert list(dict.fromkeys(name for name in names if name in parts)) == parts
    dashboard = open_dashboard(visits, people, is_paused=True)
    for summary in dashboard.locator("details > summary").all():
        summary.press("Enter")
    expect(dashboard.locator("#acts")).to_contain_text("filter.added")
    expect(dashboard.locator("#filters")).to_contain_text(MARKUP)
    names = walk_by_keyboard(dashboard)
    parts = ["Pause updates", "Hour", "Modes", "Users", "Blocks", "Filters", "Evidence"]
    assert list(dict.fromkeys(name for name in names if name in parts)) == parts


def test_a_newcomer_comes_to_an_account(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/").page
    act(page, "To the content")
    act(page, "Create an account")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Create an account at")
    write(page, "Name (optional)", "Newcomer")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Newcomer#")
    key = page.locator(".key").inner_text()
    act(page, "Open your account")
    expect(page.get_by_label("Your key")).to_be_visible()
    write(page, "Your key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#alias")).to_contain_text("Newcomer#")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    assert key not in page.url
    page.reload()
    expect(page.locator("#alias")).to_contain_text("Newcomer#")  # the tab keeps the key
    act(page, "Sign out")
    expect(page.get_by_label("Your key")).to_be_visible()


def test_an_owner_shares_a_key_and_cancels_a_request(visits: Visits, people: People) -> None:
    people.ask()
    page = open_account(visits, people)
    page.get_by_role("button", name="Cancel request").first.wait_for()
    go_to(page, "Sign out")
    while page.get_by_role("button", name="Cancel request").count():
        left = page.get_by_role("button", name="Cancel request").count()
        act(
            page,
            str(
                page.get_by_role("button", name="Cancel request").first.get_attribute("aria-label")
            ),
        )
        expect(page.get_by_role("button", name="Cancel request")).to_have_count(left - 1)
        assert is_focus_in(page, "#requests")
        page.evaluate("document.querySelector('h1').focus()")
    write(page, "Name", "For a friend")
    page.keyboard.press("Enter")
    row = page.locator("#shared tr", has_text="For a friend")
    expect(row).to_have_count(1)
    go_to(page, "Change the shared key For a friend", key="Shift+Tab")
    page.keyboard.press("Enter")
    assert get_focus(page) == "Name"
    act(page, "Cancel")
    assert get_focus(page) == "Name"
    go_to(page, "Revoke the shared key For a friend", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(row).to_contain_text("Really revoke it")
    page.keyboard.press("Space")
    expect(row).to_have_count(0)
    assert is_focus_in(page, "#shared")


def test_an_owner_cares_for_a_worker(visits: Visits, people: People) -> None:
    page = open_account(visits, people)
    name = OWNED
    act(page, f"Begin maintenance of {name}", key="Space")
    expect(page.get_by_role("button", name="End maintenance")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Begin maintenance")).to_be_focused()
    go_to(page, f"Message to {name}", key="Shift+Tab")
    page.keyboard.type("Mind the heat.")
    page.keyboard.press("Enter")
    expect(page.locator("#workers")).to_contain_text("Mind the heat.")
    assert is_focus_in(page, "#workers")
    go_to(page, "Delete the message Mind the heat.", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#workers")).not_to_contain_text("Mind the heat.")
    assert is_focus_in(page, "#workers")


def test_whoever_takes_a_deletion_back_keeps_the_focus(
    visits: Visits, people: People, stack: Stack
) -> None:
    leaver = stack.horde.create_account("Hesitant")
    page = open_with_key(visits, people, "/account", leaver.key).page
    act(page, "Delete the account")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep the account")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Delete the account")).to_be_focused()


def test_a_moderator_has_a_day(visits: Visits, people: People) -> None:
    page = open_dashboard(visits, people)
    name = OWNED
    act(page, f"Pause {name}")
    expect(page.get_by_role("button", name=f"Unpause {name}")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=f"Pause {name}")).to_be_focused()
    act(page, f"Message {name}")
    assert get_focus(page) == "Message"
    page.keyboard.type("Thank you.")
    page.keyboard.press("Enter")
    expect(page.locator("#messages")).to_contain_text("Thank you.")
    assert page.locator("#messages tr", has_text="Thank you.").inner_text().count(people.worker_id)
    act(page, "Delete the message Thank you.")
    page.keyboard.press("Enter")
    expect(page.locator("#messages")).not_to_contain_text("Thank you.")
    assert is_focus_in(page, "#messages")
    go_to(page, "Blocks", key="Shift+Tab")
    page.keyboard.press("Space")
    write(page, "Address or network", "203.0.113.0/24")
    page.keyboard.press("Enter")
    act(page, "Lift the block of 203.0.113.0/24")
    expect(page.locator("#blocks")).not_to_contain_text("203.0.113.0/24")
    assert is_focus_in(page, "#blocks")
    act(page, "Filters")
    write(page, "Expression", "plum jam")
    page.keyboard.press("Enter")
    act(page, "Delete the rule plum jam")
    page.keyboard.press("Enter")
    expect(page.locator("#filters")).not_to_contain_text("plum jam")
    assert is_focus_in(page, "#filters")
    act(page, "Evidence")
    act(page, "Read")
    expect(page.locator("#events")).to_contain_text("refused by the filters")
    go_to(page, "The prompt")
    page.keyboard.press("Tab")
    page.keyboard.type("Talked to them.")
    page.keyboard.press("Enter")
    expect(page.locator("#events")).to_contain_text("Talked to them.")
    assert is_focus_in(page, "#events")


def test_a_route_of_the_api_is_tried(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/api/").page
    write(page, "Find a route", "heartbeat")
    go_to(page, page.locator("#get_heartbeat > summary").inner_text().strip())
    page.keyboard.press("Enter")
    expect(page.locator("#get_heartbeat").get_by_role("button", name="Send")).to_be_visible()
    act(page, "Send")
    expect(page.locator("#get_heartbeat .answer")).to_contain_text("OK")
    assert get_focus(page) == "Send"
