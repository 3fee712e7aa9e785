# SPDX-License-Identifier: AGPL-3.0-or-later
"""The site, the account, the dashboard and the API page in a real browser, against a whole horde:
as a newcomer, the owner of an account and of a worker, and a moderator walk them.
"""

import pytest
from playwright.sync_api import Route, expect

from tests.acceptance._stack import wait_until
from tests.clients._browser import LAPTOP, NOON, Visit, Visits
from tests.clients._people import People, open_account, open_dashboard, open_with_key
from tests.clients.conftest import Stack

# A newcomer


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
    people.ask()
    page = open_account(visits, people)
    page.fill("#transfer-to", people.moderator.alias)
    page.fill("#transfer-amount", "5")
    page.press("#transfer-amount", "Enter")
    expect(page.locator("#said")).to_contain_text("5 kudos were given")
    page.fill("#transfer-to", "nobody#999999")
    page.press("#transfer-to", "Enter")
    expect(page.locator("#said.problem")).to_be_visible()
    cancels = page.locator("#requests button")
    expect(cancels).not_to_have_count(0)
    for left in reversed(range(cancels.count())):  # others may have asked before
        cancels.first.click()
        expect(cancels).to_have_count(left)
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


SET_HIDDEN = """(isHidden) => {
  Object.defineProperty(document, "hidden", {value: isHidden, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def count_polls(visit: Visit) -> int:
    """How often the page asked for figures."""
    visit.page.evaluate("1")  # what was asked for before is known then
    return sum("/dashboard/" in address for address in visit.addresses)


def wait_for_poll(visit: Visit) -> None:
    """Let time pass until the page asks for figures. It does not while it waits for an answer."""
    before = count_polls(visit)
    wait_until(lambda: visit.page.clock.run_for(6_000) or count_polls(visit) > before)


def test_plots_are_drawn_for_a_browser_whose_language_is_none(
    visits: Visits, people: People
) -> None:
    """Browsers take theirs from the machine, and some machines have `en-US@posix`."""
    key = people.moderator.key
    visit = open_with_key(visits, people, "/dashboard", key, locale="en-US@posix")
    expect(visit.page.locator("#plots canvas")).to_have_count(visit.page.locator(".plot").count())
    expect(visit.page.locator("#plots canvas").first).to_be_visible()


@pytest.mark.parametrize("how", ["paused", "hidden"])
def test_a_dashboard_that_is_paused_or_hidden_asks_for_nothing(
    visits: Visits, people: People, how: str
) -> None:
    visit = open_with_key(visits, people, "/dashboard", people.moderator.key, clock=True)
    page, pause = visit.page, visit.page.get_by_role("button", name="Pause updates")
    expect(page.locator("#plots canvas").first).to_be_visible()
    page.clock.pause_at(NOON)
    wait_for_poll(visit)
    if how == "paused":
        pause.click()
        expect(pause).to_have_attribute("aria-pressed", "true")
    else:
        page.evaluate(SET_HIDDEN, True)
    before = count_polls(visit)
    page.clock.run_for(120_000)
    assert count_polls(visit) == before
    if how == "paused":
        pause.click()
    else:
        page.evaluate(SET_HIDDEN, False)
    wait_for_poll(visit)


def test_a_page_that_cannot_reach_the_server_says_so_and_goes_on_when_it_can(
    visits: Visits, people: People
) -> None:
    is_away = False

    def serve(route: Route) -> None:
        if is_away and "/dashboard/" in route.request.url:
            route.abort()
        else:
            route.continue_()

    visit = open_with_key(
        visits, people, "/dashboard", people.moderator.key, clock=True, route=serve
    )
    page = visit.page
    expect(page.locator("#plots canvas").first).to_be_visible()
    page.clock.pause_at(NOON)
    is_away = True
    wait_for_poll(visit)
    expect(page.locator("#stale")).to_have_text("Not up to date: The server cannot be reached.")
    page.reload()
    expect(page.locator("#login-problem")).to_have_text("The server cannot be reached.")
    is_away = False
    page.reload()  # the key was not at fault, so the tab still has it
    expect(page.locator("#workers")).to_contain_text("Owned")


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


def test_a_route_whose_form_could_not_be_made_says_so_and_is_tried_again(
    visits: Visits, people: People
) -> None:
    is_away = True

    def serve(route: Route) -> None:
        if is_away and route.request.url.endswith("/swagger.json"):
            route.abort()
        else:
            route.continue_()

    page = visits.open(f"{people.url}/api/#get_heartbeat", route=serve).page
    operation = page.locator("#get_heartbeat")
    expect(operation).to_contain_text("The server cannot be reached.")
    is_away = False
    for _ in range(2):
        operation.locator("summary").first.click()
    expect(operation.get_by_role("button", name="Send")).to_be_visible()
    expect(operation).not_to_contain_text("The server cannot be reached.")


def test_a_command_of_the_api_page_holds_no_key(visits: Visits, people: People) -> None:
    page = visits.open(f"{people.url}/api/#get_find_user").page
    page.fill("#key", people.owner.key)
    page.press("#key", "Tab")
    operation = page.locator("#get_find_user")
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".answer")).to_contain_text(people.owner.alias)
    operation.locator("summary", has_text="As a command").click()
    expect(operation.locator("details pre")).to_contain_text("apikey: KEY")
