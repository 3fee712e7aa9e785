# SPDX-License-Identifier: AGPL-3.0-or-later
"""The chat page in a real browser, against a whole horde."""

import base64
import contextlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.acceptance._stack import wait_until
from tests.clients._browser import (
    LAPTOP,
    PHONE,
    VIEWS,
    Visit,
    Visits,
    check_looks,
    get_focus,
    go_to,
    list_barriers,
    walk_by_keyboard,
)
from tests.clients._worker import MODEL, PIECES, WEATHER
from tests.clients.conftest import Stack

REPLY = "".join(PIECES)
STORED = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
MARKDOWN = (
    "# Sky\n\nIt is **blue**.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('x')\n```\n"
)
HOSTILE = (
    "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
    " [x](javascript:document.title=1) ![p](https://evil.example/p.png)"
    " <svg onload=\"document.title='broken in'\"></svg>"
)


def build_png() -> bytes:
    """A red picture of 4 by 4 pixels."""

    def build_chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    rows = (b"\0" + b"\xff\0\0" * 4) * 4
    header = struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(build_chunk(*chunk) for chunk in chunks)


@pytest.fixture
def visit(visits: Visits, stack: Stack) -> Visit:
    """The page with the model chosen."""
    return open_chat(visits, stack)


@pytest.fixture
def page(visit: Visit) -> Page:
    """The page with the model chosen."""
    return visit.page


@pytest.fixture
def seeing(stack: Stack) -> Iterator[None]:
    """The worker sees images."""
    with stack.declaring([*stack.worker.features, "vision"]):
        yield


def open_chat(visits: Visits, stack: Stack, **options: Any) -> Visit:
    """The page with the model chosen, as seen through a view in a scheme."""
    visit = visits.open(f"{stack.front.url}/", **options)
    expect(visit.page.locator("#model")).to_have_value(MODEL)
    visit.page.on("dialog", lambda dialog: dialog.accept())
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
    return page.locator("#turns article").last.inner_text()


def change(page: Page, **values: str) -> None:
    """Change settings by their ids, with ``_`` for ``-``."""
    page.click("#open-settings")
    if not page.evaluate("document.querySelector('#more').open"):
        page.click("#more summary")
    for name, value in values.items():
        field = f"#{name.replace('_', '-')}"
        if page.evaluate(f"document.querySelector('{field}').tagName") == "SELECT":
            page.select_option(field, value)
        else:
            page.fill(field, value)
    page.click("#close-settings")


def list_messages(stack: Stack) -> list[tuple[str, Any]]:
    """What the worker was sent last."""
    return [
        (message["role"], message["content"]) for message in stack.worker.payloads[-1]["messages"]
    ]


# --- what the page may do


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
    paths = visit.list_paths(stack.front.url)
    called = {path for path in paths if not path.endswith((".js", ".css"))}
    assert called == {"/", "/page.json", "/v1/models", "/v1/chat/completions"}


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


def test_markup_of_a_person_or_a_model_is_never_run(
    visit: Visit, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.page
    monkeypatch.setattr("tests.clients._worker.PIECES", [HOSTILE])
    shown = ask_and_wait(page, HOSTILE)
    assert "<script>" in shown
    assert HOSTILE in page.inner_text(".asked")
    assert page.locator("#turns").locator("img, svg, script").count() == 0
    change(page, system=HOSTILE, tools=json.dumps([{"type": HOSTILE}]))
    assert "Code invalid_value" in ask_and_wait(page, HOSTILE)
    reload(page)
    page.click("#list .open")
    assert page.title() == "Test horde chat"
    assert not [address for address in visit.addresses if "evil" in address]


# --- asking


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


def test_markdown_is_shown_with_code_that_can_be_copied(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    monkeypatch.setattr("tests.clients._worker.PIECES", [MARKDOWN[:30], MARKDOWN[30:]])
    ask_and_wait(page, "The sky?")
    assert page.inner_text(".answered h1") == "Sky"
    assert page.inner_text(".answered strong") == "blue"
    assert page.locator(".answered td").count() == 2
    page.click(".copy-code")
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print('x')\n"


def test_text_from_right_to_left_begins_at_the_right(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.clients._worker.PIECES", ["שלום\n\nHello"])
    ask_and_wait(page, "مرحبا")
    get_direction = "(element) => getComputedStyle(element).direction"
    texts = page.locator(".asked .plain, .answered .text p")
    assert [text.evaluate(get_direction) for text in texts.all()] == ["rtl", "rtl", "ltr"]


def test_the_box_grows_with_what_is_written(page: Page) -> None:
    get_height = "document.querySelector('#message').clientHeight"
    low = page.evaluate(get_height)
    page.fill("#message", "line\n" * 6)
    high = page.evaluate(get_height)
    page.fill("#message", "line\n" * 100)
    assert low * 3 < high < page.evaluate(get_height) < LAPTOP.height / 2
    page.press("#message", "Enter")
    wait_for_the_end(page)
    assert page.evaluate(get_height) == low


def test_shift_and_enter_begin_a_line(page: Page, stack: Stack) -> None:
    page.fill("#message", "One")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("Two")
    page.press("#message", "Enter")
    expect(page.locator(".answered")).to_contain_text(REPLY)
    assert list_messages(stack)[-1] == ("user", "One\nTwo")


def test_a_conversation_goes_on_with_what_was_said_and_the_options(
    page: Page, stack: Stack
) -> None:
    change(page, system="Speak plainly.", max_tokens="99")
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
    change(page, system="")
    ask_and_wait(page, "Third?")
    assert list_messages(stack) == [("user", "Third?")]


@pytest.mark.parametrize("with_keyboard", [False, True])
def test_text_appears_while_it_is_written_and_stopping_cancels_the_request(
    page: Page, stack: Stack, with_keyboard: bool
) -> None:
    count = "SELECT count(*) FROM waiting_prompts WHERE terminal_outcome = 'cancelled'"
    before = stack.horde.database.value(count)
    ask(page, "slowly")
    expect(page.locator("#turns")).to_contain_text("One,")
    expect(page.locator(".answered")).to_have_attribute("aria-busy", "true")
    if with_keyboard:
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    assert "Stopped." in wait_for_the_end(page)
    wait_until(lambda: stack.horde.database.value(count) > before)
    assert REPLY in ask_and_wait(page, "And now?")


def test_who_waits_is_told_the_place_in_the_queue_and_the_price(page: Page, stack: Stack) -> None:
    with stack.worker.resting():
        ask(page, "The sky?")
        facts = page.locator(".answered .facts")
        expect(facts).to_contain_text("number 1 in the queue")
        expect(facts).to_contain_text("Waiting for a worker")
        expect(facts).to_contain_text("kudos")
    assert REPLY in wait_for_the_end(page)


def test_a_program_is_not_told_of_the_wait_unless_it_asks(stack: Stack) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "The sky?"}],
        "stream": True,
    }
    texts = []
    for more in ({}, {"X-Horde-Wait": "comments"}):
        headers = {"Authorization": f"Bearer {stack.client.key}", **more}
        address = f"{stack.front.url}/v1/chat/completions"
        with contextlib.ExitStack() as open_answer:
            with stack.worker.resting():
                answer = open_answer.enter_context(
                    httpx.stream("POST", address, json=body, headers=headers, timeout=60)
                )
            texts.append(answer.read().decode())
    assert ": waiting {" not in texts[0]
    assert re.search(r': waiting \{"queue_position":(null|1),"wait_time":\d+,"kudos":\d', texts[1])
    assert texts[1].endswith("data: [DONE]\n\n")


def test_reasoning_is_folded_away_from_the_reply(page: Page) -> None:
    shown = ask_and_wait(page, "reason")
    assert "Blue." in shown
    assert "The sky comes to mind." not in shown
    page.click(".reasoning summary")
    assert "The sky comes to mind." in page.inner_text(".reasoning")


# --- what goes wrong


def test_an_error_is_readable_and_the_message_can_be_sent_again(page: Page, stack: Stack) -> None:
    change(page, key="no-such-key-no-such-ke")
    shown = ask_and_wait(page, "The sky?")
    assert "Code invalid_api_key." in shown
    assert "Check the key" in shown
    change(page, key=stack.client.key)
    page.click(".again")
    wait_for_the_end(page)
    assert REPLY in page.inner_text("#turns")
    assert "invalid_api_key" not in page.inner_text("#turns")
    assert page.locator(".turn").count() == 2


def test_whoever_finds_no_worker_that_promises_all_is_offered_those_that_promise_less(
    page: Page, stack: Stack
) -> None:
    """At a click, and from then on."""
    with stack.declaring(["tools"]):
        wait_until(lambda: "best_effort" in ask_and_wait(page, "The sky?"))
        assert "Ask workers that promise less" in page.locator("#turns article").last.inner_text()
        page.locator("#turns article").last.locator(".again").first.click()
        wait_for_the_end(page)
        assert REPLY in page.locator("#turns article").last.inner_text()
        assert page.is_checked("#best-effort")
        assert REPLY in ask_and_wait(page, "And now?")
    page.click("#open-settings")
    page.uncheck("#best-effort")
    page.click("#close-settings")
    wait_until(lambda: REPLY in ask_and_wait(page, "And then?"))


def test_a_key_that_cannot_be_sent_is_named_as_the_fault(page: Page) -> None:
    change(page, key="“no-key”")
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


def test_an_empty_reply_is_said_to_be_one(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.clients._worker.PIECES", [])
    assert "The model answered with nothing." in ask_and_wait(page, "The sky?")
    monkeypatch.undo()
    page.click(".again")
    assert REPLY in wait_for_the_end(page)


def test_that_nobody_serves_chat_is_said_before_anybody_asks(visits: Visits, stack: Stack) -> None:
    def serve_nothing(route: Any) -> None:
        if route.request.url.endswith("/v1/models"):
            route.fulfill(json={"object": "list", "data": []})
        else:
            route.continue_()

    page = visits.open(f"{stack.front.url}/", route=serve_nothing).page
    expect(page.locator("#welcome-title")).to_have_text("No worker serves chat now")
    expect(page.locator("#model-facts")).to_have_text("No worker serves chat now.")
    ask(page, "The sky?")
    expect(page.locator("#composer-facts")).to_have_text("There is no model to ask now.")
    assert page.input_value("#message") == "The sky?"
    assert page.locator(".turn").count() == 0


def test_values_out_of_range_are_refused_before_they_are_sent(page: Page, stack: Stack) -> None:
    before = len(stack.worker.payloads)
    page.click("#open-settings")
    page.fill("#max-tokens", "3")
    page.keyboard.press("Escape")
    ask(page, "The sky?")
    assert page.locator(".turn").count() == 0
    expect(page.locator("#max-tokens")).to_be_focused()
    assert len(stack.worker.payloads) == before
    page.fill("#max-tokens", "64")
    page.fill("#temperature", "0.25")
    page.click("#close-settings")
    ask_and_wait(page, "The sky?")
    assert stack.worker.payloads[-1]["temperature"] == 0.25
    change(page, tools="[{]")
    expect(page.locator("#settings-problem")).to_contain_text("Tools:")
    assert page.evaluate("document.querySelector('#settings').open")


# --- turns


def test_a_reply_is_made_anew_and_a_message_edited(page: Page, stack: Stack) -> None:
    ask_and_wait(page, "First?")
    ask_and_wait(page, "Second?")
    page.get_by_role("button", name="Regenerate").last.click()
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 4
    assert [text for role, text in list_messages(stack) if role == "user"] == ["First?", "Second?"]

    page.get_by_role("button", name="Edit").first.click()
    page.get_by_role("textbox", name="Message").first.fill("Instead?")
    page.get_by_role("button", name="Resend").click()
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 2
    assert [text for role, text in list_messages(stack) if role == "user"] == ["Instead?"]

    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")
    assert "Instead?" in page.inner_text(".asked")


def test_a_turn_that_is_deleted_is_no_longer_sent(page: Page, stack: Stack) -> None:
    ask_and_wait(page, "First?")
    ask_and_wait(page, "Second?")
    page.get_by_role("button", name="Delete", exact=True).first.click()
    assert page.locator(".turn").count() == 2
    ask_and_wait(page, "Third?")
    assert [text for role, text in list_messages(stack) if role == "user"] == ["Second?", "Third?"]


# --- conversations and settings


def test_conversations_are_kept_found_renamed_and_deleted(page: Page) -> None:
    ask_and_wait(page, "About trees?")
    page.click("#new-chat")
    ask_and_wait(page, "About fish?")
    reload(page)
    names = page.locator("#list .open")
    assert names.all_inner_texts() == ["About fish?", "About trees?"]
    page.fill("#search", "trees")
    assert names.all_inner_texts() == ["About trees?"]
    names.first.click()
    assert REPLY in page.inner_text("#turns")
    assert "About trees?" in page.inner_text("#turns")

    page.get_by_role("button", name="Rename About trees?").click()
    page.get_by_role("textbox", name="New name").fill("Oak")
    page.keyboard.press("Enter")
    page.fill("#search", "")
    assert names.all_inner_texts() == ["About fish?", "Oak"]
    ask_and_wait(page, "And then?")
    assert names.all_inner_texts() == ["Oak", "About fish?"]

    page.get_by_role("button", name="Delete Oak").click()
    assert names.all_inner_texts() == ["About fish?"]
    assert page.locator(".turn").count() == 0
    page.click("#clear")
    assert names.count() == 0
    assert "fish" not in page.evaluate(STORED)


def test_conversations_go_to_a_file_and_come_back_from_it(page: Page, tmp_path: Path) -> None:
    ask_and_wait(page, "About trees?")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    page.click("#clear")
    assert page.locator("#list .open").count() == 0
    page.set_input_files("#import-file", file)
    expect(page.locator("#list-facts")).to_have_text("1 conversation imported.")
    assert page.locator("#list .open").all_inner_texts() == ["About trees?"]
    file.write_text("no JSON")
    page.set_input_files("#import-file", file)
    expect(page.locator("#list-facts")).to_contain_text("no conversations")


def test_a_reply_that_was_cut_off_by_leaving_is_kept_as_far_as_it_came(page: Page) -> None:
    ask(page, "slowly")
    expect(page.locator("#turns")).to_contain_text("One,")
    reload(page)
    page.click("#list .open")
    expect(page.locator(".answered")).to_contain_text("One,")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Message").first.fill("Again?")
    page.get_by_role("button", name="Resend").click()
    assert REPLY in wait_for_the_end(page)


def test_what_is_stored_may_be_broken(page: Page) -> None:
    broken = ("{", "[]", '"x"', '{"model": 7, "system": {}, "bestEffort": "x"}')
    for text in broken:
        page.evaluate("(text) => localStorage.setItem('horde-chat:settings', text)", text)
        page.evaluate("(text) => localStorage.setItem('horde-chat:conversation:x', text)", text)
        reload(page)
        assert page.locator("#list .open").count() == 0
    assert REPLY in ask_and_wait(page, "The sky?")


def test_the_choice_of_model_and_the_settings_are_kept_and_an_absent_model_is_named(
    page: Page,
) -> None:
    change(page, system="Be kind.")
    stored = json.loads(page.evaluate("localStorage.getItem('horde-chat:settings')"))
    assert stored["model"] == MODEL
    stored["model"] = "a model that left"
    page.evaluate("(text) => localStorage.setItem('horde-chat:settings', text)", json.dumps(stored))
    page.reload()
    expect(page.locator("#model")).to_have_value("a model that left")
    expect(page.locator("#model-facts")).to_contain_text("Nobody serves this model now")
    assert page.input_value("#system") == "Be kind."


def test_the_key_is_kept_for_the_tab_and_nowhere_else(page: Page, stack: Stack) -> None:
    change(page, key="my-secret")
    reload(page)
    assert page.input_value("#key") == "my-secret"
    assert "my-secret" not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
    change(page, key="")
    assert "my-secret" not in page.evaluate(STORED)
    change(page, key=stack.client.key)
    assert REPLY in ask_and_wait(page, "The sky?")
    assert stack.client.key not in page.evaluate("JSON.stringify({...localStorage})")
    assert stack.client.key not in page.url


def test_the_page_leads_to_the_pages_of_its_horde_and_to_the_source(
    page: Page, stack: Stack
) -> None:
    site = stack.horde.api.url.removesuffix("/api")
    pages = [f"{site}{path}" for path in ("", "/register", "/account", "/workers", "/api/")]
    links = page.locator("#links a")
    expect(links).to_have_count(6)
    found = [link.get_attribute("href") for link in links.all()]
    assert found == [*pages, "https://source.example"]
    assert [httpx.get(address).status_code for address in pages] == [200] * 5


# --- images, tools and JSON


def test_images_are_added_by_file_paste_and_drop_and_seen_by_the_worker(
    seeing: None, visits: Visits, stack: Stack, tmp_path: Path
) -> None:
    page = open_chat(visits, stack).page
    file = tmp_path / "red.png"
    file.write_bytes(build_png())
    expect(page.locator("#attach")).to_be_visible()
    page.set_input_files("#files", file)
    expect(page.locator("#attached img")).to_have_count(1)
    give = """([kind, data]) => {
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], 'red.png', {type: 'image/png'}));
      const event = kind === 'paste'
        ? new ClipboardEvent('paste', {clipboardData: transfer, bubbles: true, cancelable: true})
        : new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true});
      document.querySelector('#message').dispatchEvent(event);
    }"""
    for count, kind in enumerate(("paste", "drop"), start=2):
        page.evaluate(give, [kind, base64.b64encode(build_png()).decode()])
        expect(page.locator("#attached img")).to_have_count(count)
    page.get_by_role("button", name="Remove image 3").click()
    assert REPLY in ask_and_wait(page, "What is it?")
    parts = list_messages(stack)[-1][1]
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]
    assert page.locator(".asked img").count() == 2
    reload(page)
    page.click("#list .open")
    assert page.locator(".asked img").count() == 2


def test_a_model_without_eyes_is_sent_no_image(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(build_png())
    expect(page.locator("#attach")).to_be_hidden()
    page.set_input_files("#files", file)
    expect(page.locator("#composer-facts")).to_have_text("This model sees no images.")
    assert page.locator("#attached img").count() == 0


def test_a_tool_is_called_and_answered_by_hand(page: Page, stack: Stack) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    change(page, tools=json.dumps([tool]))
    assert "Calls get_weather" in ask_and_wait(page, "The weather?")
    page.get_by_label("Result of get_weather").fill("21 degrees")
    page.get_by_role("button", name="Send results").click()
    assert WEATHER in wait_for_the_end(page)
    assert list_messages(stack)[-1] == ("tool", "21 degrees")


def test_json_is_asked_for_and_shown_as_code(page: Page, stack: Stack) -> None:
    change(page, format="json_object", system="Answer in JSON.")
    ask_and_wait(page, "Who?")
    assert '"Ada"' in page.inner_text(".answered pre code")
    assert stack.worker.payloads[-1]["response_format"]["type"] == "json_object"


# --- for everybody


def test_somebody_without_a_mouse_reaches_everything(page: Page) -> None:
    ask_and_wait(page, "The sky?")
    page.fill("#message", "And now?")
    names = walk_by_keyboard(page)
    assert names[:4] == ["Model", "Settings", "New chat", "Search conversations"]
    assert names[-2:] == ["Message", "Send"]
    wanted = {"The sky?", "Rename The sky?", "Export", "Account", "Edit", "Regenerate"}
    assert wanted <= set(names)


def test_a_conversation_is_renamed_and_deleted_by_keyboard_and_the_focus_stays(
    page: Page,
) -> None:
    for text in ("The sky?", "The sea?"):
        page.click("#new-chat")
        ask_and_wait(page, text)
    page.focus("#search")
    go_to(page, "Rename The sea?")
    page.keyboard.press("Enter")
    page.keyboard.type("A name")
    page.keyboard.press("Escape")
    assert get_focus(page) == "Rename The sea?"
    page.keyboard.press("Enter")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("Tides")
    page.keyboard.press("Enter")
    assert get_focus(page) == "Rename Tides"
    go_to(page, "Delete Tides")
    page.keyboard.press("Enter")
    assert get_focus(page) == "Delete The sky?"
    page.keyboard.press("Enter")
    expect(page.locator("#list li")).to_have_count(0)
    assert get_focus(page) == "Search conversations"


def test_whoever_takes_an_edit_or_the_settings_back_stays_where_they_were(page: Page) -> None:
    ask_and_wait(page, "The sky?")
    page.focus("#search")
    go_to(page, "Edit")
    page.keyboard.press("Enter")
    page.keyboard.type(" And the sea?")
    page.keyboard.press("Escape")
    assert get_focus(page) == "Edit"
    go_to(page, "Settings", key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    assert get_focus(page) == "Settings"


def test_a_phone_shows_the_model_and_finds_conversations_behind_a_button(
    visits: Visits, stack: Stack
) -> None:
    page = open_chat(visits, stack, view=PHONE).page
    expect(page.locator("#model-facts .name")).to_have_text(MODEL)
    expect(page.locator("#model-facts .name")).to_be_in_viewport()
    ask_and_wait(page, "The sky?")
    expect(page.locator("#list .open")).to_be_hidden()
    page.click("#new-chat")
    page.click("#open-side")
    page.click("#list .open")
    expect(page.locator("#side")).to_be_hidden()
    assert REPLY in page.inner_text("#turns")


def test_the_page_suits_every_screen_and_scheme_and_keeps_nobody_out(
    visits: Visits, stack: Stack, axe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_chat(visits, stack).page
    check_looks(page, axe)
    monkeypatch.setattr("tests.clients._worker.PIECES", [MARKDOWN, "`" + "x" * 200 + "`"])
    ask_and_wait(page, "What is the sky like, when " + "x" * 200 + "?")
    ask_and_wait(page, "fail")
    check_looks(page, axe)
    page.click("#open-settings")
    page.click("#more summary")
    check_looks(page, axe)
    page.keyboard.press("Escape")
    for view in VIEWS.values():
        page.set_viewport_size({"width": view.width, "height": view.height})
        expect(page.locator("#send")).to_be_in_viewport()
    page.set_viewport_size({"width": PHONE.width, "height": PHONE.height})
    page.click("#open-side")
    assert list_barriers(page, axe) == []
