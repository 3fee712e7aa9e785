# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every page at 320 pixels, on a phone, on a laptop and at 200%, light and dark: it fits, keeps
nobody out, and shows what others wrote as text.
"""

from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.clients._browser import Visits, check_looks
from tests.clients._people import (
    MARKUP,
    OWN_MODEL,
    OWNED,
    REFUSED_PROMPT,
    People,
    open_account,
    open_dashboard,
)
from tests.clients._worker import MODEL
from tests.clients.conftest import Stack

OPEN_PAGES = (
    *("/", f"/models/{MODEL}", f"/models/{quote(OWN_MODEL)}", "/workers", "/teams", "/leaders"),
    *("/news", "/register", "/account", "/dashboard", "/terms", "/privacy", "/sponsors", "/acount"),
)
SHOWING_OTHERS = ("/", f"/models/{quote(OWN_MODEL)}")


def check_page(page: Page, axe: str) -> None:
    """A page looks right everywhere, and shows no markup of others as such."""
    check_looks(page, axe)
    assert page.locator("img").count() == 0, page.url
    assert page.evaluate("name") != "1"  # what the markup would set


@pytest.mark.parametrize("path", OPEN_PAGES)
def test_a_page_for_everybody(visits: Visits, people: People, axe: str, path: str) -> None:
    page = visits.open(f"{people.url}{path}").page
    if path in SHOWING_OTHERS:
        expect(page.locator("main")).to_contain_text(MARKUP)
    check_page(page, axe)


def test_the_page_of_a_team(visits: Visits, people: People, axe: str) -> None:
    page = visits.open(f"{people.url}/teams/{people.team_id}").page
    expect(page.locator("h1")).to_have_text(OWNED)
    check_page(page, axe)


def test_the_page_after_registering(visits: Visits, people: People, axe: str) -> None:
    page = visits.open(f"{people.url}/register").page
    page.fill("#username", "Somebody new")
    page.press("#username", "Enter")
    expect(page.locator(".key")).to_be_visible()
    check_page(page, axe)


def test_the_page_of_the_api_with_a_route_open(visits: Visits, people: People, axe: str) -> None:
    page = visits.open(f"{people.url}/api/#post_chat_async_generate").page
    operation = page.locator("#post_chat_async_generate")
    expect(operation.get_by_role("button", name="Send")).to_be_visible()
    for summary in operation.locator("details > summary").all():
        summary.click()
    check_page(page, axe)


def test_the_account(visits: Visits, people: People, axe: str) -> None:
    people.ask()
    page = open_account(visits, people, is_paused=True)
    for part in ("#workers", "#shared", "#requests", "#alias"):
        expect(page.locator(part)).to_contain_text(MARKUP)
    check_page(page, axe)


def open_every_part(page: Page) -> None:
    """The dashboard with all that a moderator can see."""
    for summary in page.locator("details > summary").all():
        summary.click()
    page.fill("#user-search", "1")
    page.press("#user-search", "Enter")
    expect(page.locator("#user-name")).to_be_visible()
    page.fill("#worker-name", OWNED)
    page.press("#worker-name", "Enter")
    page.click("#evidence button[type=submit]")


def test_the_dashboard(visits: Visits, people: People, axe: str) -> None:
    people.ask()
    page = open_dashboard(visits, people, is_paused=True)
    open_every_part(page)
    expect(page.locator("#events")).to_contain_text(REFUSED_PROMPT)
    for part in ("#workers", "#worker-found", "#queue", "#filters", "#messages", "#acts"):
        expect(page.locator(part)).to_contain_text(MARKUP)
    check_page(page, axe)


def test_a_mistyped_address_of_the_chat(visits: Visits, stack: Stack, axe: str) -> None:
    page = visits.open(f"{stack.front.url}/some/where").page
    check_page(page, axe)
    page.get_by_role("link", name="To the chat").click()
    expect(page.locator("#message")).to_be_visible()
