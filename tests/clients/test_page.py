# SPDX-License-Identifier: AGPL-3.0-or-later
"""The chat page in a real browser, against a whole horde."""

from collections.abc import Iterator

import httpx
import pytest

from tests.acceptance._stack import wait_until
from tests.clients._browser import Browser, Page
from tests.clients._worker import MODEL, PIECES
from tests.clients.conftest import Stack

REPLY = "".join(PIECES)
HAS_MODELS = "document.querySelector('#model').value"
IS_IDLE = "!document.querySelector('#send').hidden"
MARKUP = "<img src=x onerror=\"document.title='broken in'\"><b>bold</b>"


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The page with the model chosen; at the end nobody may have complained."""
    opened = open_page(browser, stack)
    yield opened
    assert opened.list_complaints() == []


def open_page(browser: Browser, stack: Stack, **options: object) -> Page:
    opened = browser.open(f"{stack.front.url}/", **options)  # type: ignore[arg-type]
    opened.wait_for(HAS_MODELS)
    return opened


def reload(page: Page) -> None:
    """Load the page again, with all it asks for."""
    page.reload()
    page.wait_for(HAS_MODELS)


def ask(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.fill("#message", text)
    page.press("Enter")


def ask_and_wait(page: Page, text: str) -> str:
    """The text of the last turn once it is over."""
    ask(page, text)
    page.wait_for(IS_IDLE)
    return page.text("#turns article:last-child")


def list_messages(stack: Stack) -> list[tuple[str, str]]:
    """What the worker was sent last."""
    return [
        (message["role"], message["content"]) for message in stack.worker.payloads[-1]["messages"]
    ]


def test_the_page_may_load_and_call_nothing_but_its_server(page: Page, stack: Stack) -> None:
    ask_and_wait(page, "The sky?")
    answer = httpx.get(f"{stack.front.url}/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == (
        "nosniff",
        "no-referrer",
    )
    assert "x-request-id" in answer.headers
    prefix = f"{stack.front.url}/"
    requested = page.list_requested_addresses()
    assert {address.removeprefix(prefix) for address in requested} == {
        "",
        "chat.css",
        "horde.css",
        "chat.js",
        "v1/models",
        "v1/chat/completions",
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
    assert MODEL in page.text("#model")
    assert "1 worker" in page.text("#model-facts")
    shown = ask_and_wait(page, "What is the sky like?")
    assert REPLY in shown
    assert "answering worker" in shown
    assert "kudos" in shown
    assert "5 tokens" in shown
    assert page.text("#announcement") == "The reply is complete."
    assert page.focused() == "message"


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
    assert page.evaluate("document.querySelector('#turns').childElementCount") == 0
    page.fill("#system", "")
    ask_and_wait(page, "Third?")
    assert list_messages(stack) == [("user", "Third?")]


def test_text_appears_while_it_is_written_and_stopping_cancels_the_request(
    page: Page, stack: Stack
) -> None:
    ask(page, "slowly")
    page.wait_for("document.querySelector('#turns').innerText.includes('One,')")
    assert page.evaluate("document.querySelector('.answered').getAttribute('aria-busy')") == "true"
    page.click("#stop")
    page.wait_for(IS_IDLE)
    assert "Stopped." in page.text(".answered")
    count = "SELECT count(*) FROM waiting_prompts WHERE terminal_outcome = 'cancelled'"
    wait_until(lambda: stack.horde.database.value(count) >= 1)
    assert REPLY in ask_and_wait(page, "And now?")


def test_reasoning_is_folded_away_from_the_reply(page: Page) -> None:
    shown = ask_and_wait(page, "reason")
    assert "Blue." in shown
    assert "The sky comes to mind." not in shown
    page.click(".reasoning summary")
    assert "The sky comes to mind." in page.text(".reasoning")


def test_an_error_is_readable_and_the_message_can_be_sent_again(page: Page, stack: Stack) -> None:
    page.fill("#key", "no-such-key-no-such-ke")
    shown = ask_and_wait(page, "The sky?")
    assert "Code invalid_api_key." in shown
    assert "Check the key" in shown
    page.fill("#key", stack.client.key)
    page.click(".again")
    page.wait_for(IS_IDLE)
    assert REPLY in page.text("#turns")
    assert "invalid_api_key" not in page.text("#turns")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 2


def test_whoever_finds_no_worker_that_promises_all_is_offered_those_that_promise_less(
    page: Page, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U-23: at a click, and from then on."""
    with monkeypatch.context() as patch:
        patch.setattr("tests.clients._worker.FEATURES", ["tools"])
        wait_until(lambda: "best_effort" in ask_and_wait(page, "The sky?"))
        assert "Ask workers that promise less" in page.text("#turns article:last-child")
        page.click("#turns article:last-child .again")
        page.wait_for(IS_IDLE)
        assert REPLY in page.text("#turns article:last-child")
        assert page.evaluate("document.querySelector('#best-effort').checked") is True
        assert REPLY in ask_and_wait(page, "And now?")
    page.evaluate("document.querySelector('#best-effort').checked = false")
    wait_until(lambda: REPLY in ask_and_wait(page, "And then?"))


def test_a_key_that_cannot_be_sent_is_named_as_the_fault(page: Page) -> None:
    page.fill("#key", "“no-key”")
    shown = ask_and_wait(page, "The sky?")
    assert "Code invalid_api_key." in shown
    assert "Check the key" in shown


def test_whoever_tries_again_with_the_keyboard_goes_on_with_the_next_message(page: Page) -> None:
    ask_and_wait(page, "fail")
    page.evaluate("document.querySelector('.again').focus()")
    page.press("Enter")
    page.wait_for(IS_IDLE)
    assert page.focused() == "message"


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
    assert MARKUP in page.text(".asked")
    assert page.evaluate("document.querySelectorAll('#turns img, #turns b').length") == 0
    assert page.evaluate("document.title") == "Horde chat"


def test_the_key_is_kept_only_when_asked_and_only_for_the_tab(page: Page) -> None:
    page.fill("#key", "my-secret")
    page.press("Tab")
    stored = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
    assert "my-secret" not in page.evaluate(stored)
    reload(page)
    assert page.evaluate("document.querySelector('#key').value") == ""

    page.fill("#key", "my-secret")
    page.click("#keep-key")
    reload(page)
    assert page.evaluate("document.querySelector('#key').value") == "my-secret"
    assert "my-secret" not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
    page.click("#keep-key")
    assert "my-secret" not in page.evaluate(stored)


def test_values_out_of_range_are_refused_before_they_are_sent(page: Page, stack: Stack) -> None:
    before = len(stack.worker.payloads)
    page.fill("#max-tokens", "3")
    ask(page, "The sky?")
    assert page.evaluate("document.querySelector('#turns').childElementCount") == 0
    assert page.focused() == "max-tokens"
    assert len(stack.worker.payloads) == before
    page.fill("#max-tokens", "64")
    page.fill("#temperature", "0.25")
    ask_and_wait(page, "The sky?")
    assert stack.worker.payloads[-1]["temperature"] == 0.25


def test_shift_and_enter_begin_a_line(page: Page, stack: Stack) -> None:
    page.fill("#message", "One")
    page.press("Enter", shift=True)
    page.send("Input.insertText", text="Two")
    page.press("Enter")
    page.wait_for(f"{IS_IDLE} && document.querySelector('.answered')")
    assert list_messages(stack)[-1] == ("user", "One\nTwo")


def test_every_control_has_a_name(page: Page) -> None:
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "button", "combobox", "checkbox", "spinbutton", "log", "main", "banner"}
    controls = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if "role" in node
    ]
    found = [(role, name) for role, name in controls if role in roles]
    assert {role for role, _ in found} == roles
    assert [role for role, name in found if not name and role not in ("main", "banner")] == []


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize(("width", "height", "is_phone"), [(1200, 800, False), (360, 640, True)])
def test_nothing_is_cut_off_on_a_desk_or_a_phone(
    browser: Browser, stack: Stack, width: int, height: int, is_phone: bool, is_dark: bool
) -> None:
    page = open_page(browser, stack, width=width, height=height, is_dark=is_dark, is_phone=is_phone)
    assert page.evaluate("document.querySelector('#settings').open") is not is_phone
    ask_and_wait(page, "What is the sky like, when " + "x" * 200 + "?")
    ask_and_wait(page, "fail")
    assert page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth &&"
        " document.documentElement.scrollHeight <= innerHeight"
    )
    assert page.evaluate(SMALLEST_CONTRAST) >= 4.5
    if is_phone:
        page.click("#settings summary")
        page.click("#system")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.list_complaints() == []


# WCAG's ratio of each visible text to what lies behind it. Colours are read back from a canvas,
# whatever notation they have.
SMALLEST_CONTRAST = """(() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const read = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (data) => {
    const [r, g, b] = [...data].slice(0, 3).map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = read(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return read('white');
  };
  const ratios = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [luminance(read(getComputedStyle(element).color)), luminance(behind(element))];
    ratios.push((Math.max(a, b) + .05) / (Math.min(a, b) + .05));
  }
  return Math.min(...ratios);
})()"""
