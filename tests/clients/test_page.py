# SPDX-License-Identifier: AGPL-3.0-or-later
"""The chat page in a real browser, against a whole horde."""

from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.acceptance._stack import wait_until
from tests.clients._browser import (
    PHONE,
    Scheme,
    View,
    Visit,
    Visits,
    fits_in_width,
    list_barriers,
    walk_by_keyboard,
)
from tests.clients._worker import MODEL, PIECES
from tests.clients.conftest import Stack

REPLY = "".join(PIECES)
MARKUP = "<img src=x onerror=\"document.title='broken in'\"><b>bold</b>"


@pytest.fixture
def visit(visits: Visits, stack: Stack) -> Visit:
    """The page with the model chosen."""
    return open_chat(visits, stack)


@pytest.fixture
def page(visit: Visit) -> Page:
    """The page with the model chosen."""
    return visit.page


def open_chat(visits: Visits, stack: Stack, **options: Any) -> Visit:
    """The page with the model chosen, as seen through a view in a scheme."""
    visit = visits.open(f"{stack.front.url}/", **options)
    expect(visit.page.locator("#model")).to_have_value(MODEL)
    return visit


def reload(page: Page) -> None:
    """Load the page again, with all it asks for."""
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL)


def ask(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.fill("#message", text)
    page.press("#message", "Enter")


def ask_and_wait(page: Page, text: str) -> str:
    """The text of the last turn once it is over."""
    ask(page, text)
    return wait_for_the_end(page)


def wait_for_the_end(page: Page) -> str:
    """The text of the last turn once it is over."""
    page.wait_for_selector("#send", state="visible")
    return page.inner_text("#turns article:last-child")


def list_messages(stack: Stack) -> list[tuple[str, str]]:
    """What the worker was sent last."""
    return [
        (message["role"], message["content"]) for message in stack.worker.payloads[-1]["messages"]
    ]


def test_the_page_may_load_and_call_nothing_but_its_server(visit: Visit, stack: Stack) -> None:
    ask_and_wait(visit.page, "The sky?")
    answer = httpx.get(f"{stack.front.url}/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == (
        "nosniff",
        "no-referrer",
    )
    assert "x-request-id" in answer.headers
    assert visit.list_paths(stack.front.url) == {
        "/",
        "/chat.css",
        "/horde.css",
        "/chat.js",
        "/v1/models",
        "/v1/chat/completions",
    }


def test_a_file_the_browser_has_is_not_sent_again(stack: Stack) -> None:
    first = httpx.get(f"{stack.front.url}/chat.js")
    again = httpx.get(
        f"{stack.front.url}/chat.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (first.headers["content-type"], again.status_code, again.content) == (
        "text/javascript; charset=utf-8",
        304,
        b"",
    )
    refused = httpx.post(f"{stack.front.url}/")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_supported")


def test_a_reply_is_shown_with_its_worker_and_price(page: Page) -> None:
    assert MODEL in page.inner_text("#model")
    assert "1 worker" in page.inner_text("#model-facts")
    shown = ask_and_wait(page, "What is the sky like?")
    assert REPLY in shown
    assert "answering worker" in shown
    assert "kudos" in shown
    assert "5 tokens" in shown
    assert page.inner_text("#announcement") == "The reply is complete."
    expect(page.locator("#message")).to_be_focused()


def test_a_conversation_goes_on_with_what_was_said_and_the_options(
    page: Page, stack: Stack
) -> None:
    page.fill("#system", "Speak plainly.")
    page.fill("#max-tokens", "99")
    ask_and_wait(page, "First?")
    ask_and_wait(page, "Second?")
    expected = [
        ("system", "Speak plainly."),
        ("user", "First?"),
        ("assistant", REPLY),
        ("user", "Second?"),
    ]
    assert list_messages(stack) == expected
    assert stack.worker.payloads[-1]["max_length"] == 99

    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    page.fill("#system", "")
    ask_and_wait(page, "Third?")
    assert list_messages(stack) == [("user", "Third?")]


def test_text_appears_while_it_is_written_and_stopping_cancels_the_request(
    page: Page, stack: Stack
) -> None:
    ask(page, "slowly")
    expect(page.locator("#turns")).to_contain_text("One,")
    expect(page.locator(".answered")).to_have_attribute("aria-busy", "true")
    page.click("#stop")
    wait_for_the_end(page)
    assert "Stopped." in page.inner_text(".answered")
    count = "SELECT count(*) FROM waiting_prompts WHERE terminal_outcome = 'cancelled'"
    wait_until(lambda: stack.horde.database.value(count) >= 1)
    assert REPLY in ask_and_wait(page, "And now?")


def test_reasoning_is_folded_away_from_the_reply(page: Page) -> None:
    shown = ask_and_wait(page, "reason")
    assert "Blue." in shown
    assert "The sky comes to mind." not in shown
    page.click(".reasoning summary")
    assert "The sky comes to mind." in page.inner_text(".reasoning")


def test_an_error_is_readable_and_the_message_can_be_sent_again(page: Page, stack: Stack) -> None:
    page.fill("#key", "no-such-key-no-such-ke")
    shown = ask_and_wait(page, "The sky?")
    assert "Code invalid_api_key." in shown
    assert "Check the key" in shown
    page.fill("#key", stack.client.key)
    page.click(".again")
    wait_for_the_end(page)
    assert REPLY in page.inner_text("#turns")
    assert "invalid_api_key" not in page.inner_text("#turns")
    assert page.locator(".turn").count() == 2


def test_whoever_finds_no_worker_that_promises_all_is_offered_those_that_promise_less(
    page: Page, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U-23: at a click, and from then on."""
    with monkeypatch.context() as patch:
        patch.setattr("tests.clients._worker.FEATURES", ["tools"])
        wait_until(lambda: "best_effort" in ask_and_wait(page, "The sky?"))
        assert "Ask workers that promise less" in page.inner_text("#turns article:last-child")
        page.click("#turns article:last-child .again")
        wait_for_the_end(page)
        assert REPLY in page.inner_text("#turns article:last-child")
        assert page.is_checked("#best-effort")
        assert REPLY in ask_and_wait(page, "And now?")
    page.uncheck("#best-effort")
    wait_until(lambda: REPLY in ask_and_wait(page, "And then?"))


def test_a_key_that_cannot_be_sent_is_named_as_the_fault(page: Page) -> None:
    page.fill("#key", "“no-key”")
    shown = ask_and_wait(page, "The sky?")
    assert "Code invalid_api_key." in shown
    assert "Check the key" in shown


def test_whoever_tries_again_with_the_keyboard_goes_on_with_the_next_message(page: Page) -> None:
    ask_and_wait(page, "fail")
    page.press(".again", "Enter")
    wait_for_the_end(page)
    expect(page.locator("#message")).to_be_focused()


def test_a_failed_reply_tells_its_request_and_is_no_part_of_the_conversation(
    page: Page, stack: Stack
) -> None:
    shown = ask_and_wait(page, "fail")
    assert "Code generation_failed." in shown
    assert "Request " in shown
    ask_and_wait(page, "And now?")
    assert [text for role, text in list_messages(stack) if role != "system"] == ["And now?"]


def test_markup_is_shown_as_text(page: Page, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.clients._worker.PIECES", [MARKUP])
    shown = ask_and_wait(page, MARKUP)
    assert MARKUP in shown
    assert MARKUP in page.inner_text(".asked")
    assert page.locator("#turns img, #turns b").count() == 0
    assert page.title() == "Horde chat"


def test_the_key_is_kept_only_when_asked_and_only_for_the_tab(page: Page) -> None:
    page.fill("#key", "my-secret")
    page.press("#key", "Tab")
    stored = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
    assert "my-secret" not in page.evaluate(stored)
    reload(page)
    assert page.input_value("#key") == ""

    page.fill("#key", "my-secret")
    page.click("#keep-key")
    reload(page)
    assert page.input_value("#key") == "my-secret"
    assert "my-secret" not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
    page.click("#keep-key")
    assert "my-secret" not in page.evaluate(stored)


def test_values_out_of_range_are_refused_before_they_are_sent(page: Page, stack: Stack) -> None:
    before = len(stack.worker.payloads)
    page.fill("#max-tokens", "3")
    ask(page, "The sky?")
    assert page.locator(".turn").count() == 0
    expect(page.locator("#max-tokens")).to_be_focused()
    assert len(stack.worker.payloads) == before
    page.fill("#max-tokens", "64")
    page.fill("#temperature", "0.25")
    ask_and_wait(page, "The sky?")
    assert stack.worker.payloads[-1]["temperature"] == 0.25


def test_shift_and_enter_begin_a_line(page: Page, stack: Stack) -> None:
    page.fill("#message", "One")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("Two")
    page.press("#message", "Enter")
    expect(page.locator(".answered")).to_contain_text(REPLY)
    assert list_messages(stack)[-1] == ("user", "One\nTwo")


def test_somebody_without_a_mouse_reaches_everything(page: Page) -> None:
    page.fill("#message", "The sky?")
    names = walk_by_keyboard(page)
    assert names[:3] == ["New chat", "Settings", "Model"]
    assert names[-2:] == ["Message", "Send"]


def test_the_page_suits_every_screen_and_scheme_and_keeps_nobody_out(
    visits: Visits, stack: Stack, view: View, scheme: Scheme, axe: str
) -> None:
    page = open_chat(visits, stack, view=view, scheme=scheme).page
    is_open = "document.querySelector('#settings').open"
    assert page.evaluate(is_open) is (view.width > PHONE.width * 2)
    ask_and_wait(page, "What is the sky like, when " + "x" * 200 + "?")
    ask_and_wait(page, "fail")
    assert fits_in_width(page)
    assert list_barriers(page, axe) == []
    if not page.evaluate(is_open):
        page.click("#settings summary")
        page.click("#system")
        assert fits_in_width(page)
        assert list_barriers(page, axe) == []
