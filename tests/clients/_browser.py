# SPDX-License-Identifier: AGPL-3.0-or-later
"""A headless Chromium driven over the two pipes of its DevTools protocol: no driver program, no
library.

Clicks and keys go through the browser's own input, so that what is hidden or covered cannot be
pressed.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

ANSWER_SECONDS = 60  # of one command on a busy machine
WAIT_SECONDS = 60
LOWEST_DESCRIPTOR = 20  # away from 3 and 4, where the browser expects its pipes

OPTIONS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root; the browser sees nothing but our own page
    "--no-zygote",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
KEY_CODES = {"Enter": 13, "Tab": 9}


class Browser:
    """One browser process."""

    def __init__(self, program: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "browser.log"
        theirs_in, self._out = (move_up(descriptor) for descriptor in os.pipe())
        self._in, theirs_out = (move_up(descriptor) for descriptor in os.pipe())
        log = move_up(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        try:
            self._pid = os.posix_spawn(
                program,
                [str(program), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                build_environment(program, folder),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                    (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
            )
        finally:
            for descriptor in (theirs_in, theirs_out, log):
                os.close(descriptor)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol. Returns its result; what happens meanwhile is kept in
        ``events``.
        """
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read_message(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _read_message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self._in, 1 << 16) if ready else b""
            assert piece, (
                f"the browser does not answer\n{self.log.read_text(errors='replace')[-3000:]}"
            )
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(
        self,
        url: str,
        *,
        width: int = 1200,
        height: int = 800,
        is_dark: bool = False,
        is_phone: bool = False,
    ) -> "Page":
        """A new page without anything stored by another one, loaded."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        page = Page(
            self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        )
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        scale = 2 if is_phone else 1
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_phone,
        )
        page.send("Page.navigate", url=url)
        page.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close")
        os.close(self._out)
        os.close(self._in)
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol for this page."""
        return self._browser.send(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = WAIT_SECONDS) -> None:
        """Ask until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never: {expression}\n{self.text()}"
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        """The text of an element as a person sees it."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press the middle of an element, which has to be what lies there."""
        find = f"document.querySelector({json.dumps(selector)})"
        x, y, is_on_top = self.evaluate(
            f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'nearest'}}); const r ="
            " e.getBoundingClientRect(); const x = r.x + r.width / 2, y = r.y + r.height / 2, top"
            " = document.elementFromPoint(x, y); return [x, y, e === top || e.contains(top)];"
            " })()"
        )
        assert is_on_top, f"{selector} cannot be pressed"
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Click into a field and replace what is there."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press one of KEY_CODES on whatever has the focus."""
        code = KEY_CODES[key]
        text = {"text": "\r"} if key == "Enter" else {}
        common: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def focused(self) -> str:
        """The id of what has the focus."""
        return str(self.evaluate("document.activeElement.id"))

    def reload(self) -> None:
        """Load the page again."""
        self.evaluate("window.isOld = true")
        self.send("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def screenshot(self, path: Path) -> None:
        """What is seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def iter_events(self, method: str) -> Iterator[dict[str, Any]]:
        """The parameters of what this page reported so far under a name."""
        self.evaluate("0")  # reads what is in the pipe
        for event in self._browser.events:
            if event.get("method") == method and event.get("sessionId") == self._session:
                yield event["params"]

    def list_complaints(self) -> list[str]:
        """Uncaught errors, refusals of the page's policy and console errors, but for answers that
        are errors.
        """
        found = [
            str(event["exceptionDetails"]) for event in self.iter_events("Runtime.exceptionThrown")
        ]
        entries = [event["entry"] for event in self.iter_events("Log.entryAdded")]
        found += [
            entry["text"]
            for entry in entries
            if entry["level"] == "error" and entry["source"] != "network"
        ]
        return found + [
            str(event)
            for event in self.iter_events("Runtime.consoleAPICalled")
            if event["type"] == "error"
        ]

    def list_requested_addresses(self) -> set[str]:
        """Everything the page asked for, inlined data aside."""
        addresses = {
            str(event["request"]["url"]) for event in self.iter_events("Network.requestWillBeSent")
        }
        return {address for address in addresses if not address.startswith("data:")}


def move_up(descriptor: int) -> int:
    """The same file under a higher number, closed in children."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
    os.close(descriptor)
    return moved


FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def build_environment(program: Path, folder: Path) -> Mapping[str, str]:
    """A home of its own, and the fonts that came with the browser: a machine may have none."""
    environment = {**os.environ, "HOME": str(folder)}
    fonts = program.with_name("fonts")
    if fonts.is_dir():
        environment["FONTCONFIG_FILE"] = str(folder / "fonts.conf")
        (folder / "fonts.conf").write_text(FONTS.format(fonts=fonts, cache=folder / "fonts-cache"))
    return environment
