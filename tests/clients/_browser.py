# SPDX-License-Identifier: AGPL-3.0-or-later
"""Pages in a headless Chromium that Playwright drives: the sizes they are looked at in, what they
must never do, and how somebody without a mouse gets through them.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from tests.acceptance._stack import wait_until

WAIT_MILLISECONDS: Final = 60_000  # of a step, on a busy machine
MORNING: Final = "2030-06-03T08:00:00"  # of a page with a clock
NOON: Final = "2030-06-03T12:00:00"
MOST_STOPS: Final = 500  # of the Tab key on one page

OPTIONS: Final = (
    "--no-zygote",
    "--disable-gpu",
    "--disable-quic",
    "--force-color-profile=srgb",
    # No page may reach another machine; one that tries is found by what it asked for.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

type Scheme = Literal["light", "dark"]
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")


@dataclass(frozen=True)
class View:
    """What somebody looks through: CSS pixels, and how many of the screen's make one of them."""

    width: int
    height: int
    scale: int = 1
    is_phone: bool = False


LAPTOP: Final = View(1366, 768)
PHONE: Final = View(390, 844, scale=2, is_phone=True)
VIEWS: Final[Mapping[str, View]] = {
    "narrow": View(320, 640, scale=2, is_phone=True),
    "phone": PHONE,
    "laptop": LAPTOP,
    "zoomed": View(683, 384, scale=2),  # the laptop at 200%
}


@contextmanager
def running_browser(program: Path, folder: Path) -> Iterator[Browser]:
    """One browser process with a home of its own."""
    environment = build_environment(program, folder)
    expect.set_options(timeout=WAIT_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(OPTIONS), env=environment
        )
        yield browser
        browser.close()


FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


def build_environment(program: Path, folder: Path) -> dict[str, str | float | bool]:
    """A home of its own, and the fonts that came with the browser: a machine may have none."""
    environment: dict[str, str | float | bool] = {**os.environ, "HOME": str(folder)}
    fonts = program.with_name("fonts")
    if fonts.is_dir():
        environment["FONTCONFIG_FILE"] = str(folder / "fonts.conf")
        (folder / "fonts.conf").write_text(FONTS.format(fonts=fonts, cache=folder / "fonts-cache"))
    return environment


@dataclass
class Visit:
    """A page without anything stored by another one, and what it did so far.

    ``complaints``: uncaught errors, refusals of the page's policy and console errors, but for
    answers that are errors. ``addresses``: everything it asked for, inlined data aside. ``open``:
    what is not answered yet.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    open: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.on("request", lambda request: self.open.add(request))
        self.page.on("requestfinished", lambda request: self.open.discard(request))
        self.page.on("requestfailed", lambda request: self.open.discard(request))

    def _note(self, message: ConsoleMessage) -> None:
        is_answer = message.text.startswith("Failed to load resource")
        if message.type == "error" and not is_answer:
            self.complaints.append(message.text)

    def pause(self) -> None:
        """Let a page that draws itself anew rest, with all shown that it asked for."""
        self.page.get_by_role("button", name="Pause updates").click()
        wait_until(lambda: self.page.evaluate("true") and not self.open)
        self.page.evaluate("new Promise((seen) => requestAnimationFrame(seen))")

    def list_paths(self, origin: str) -> set[str]:
        """What was asked of a server; an address of another one stays whole."""
        asked = {
            address for address in self.addresses if not address.startswith(("data:", "blob:"))
        }
        return {address.removeprefix(origin) for address in asked}


class Visits:
    """The visits of one test."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._all: list[Visit] = []

    def open(
        self,
        url: str,
        *,
        view: View = LAPTOP,
        scheme: Scheme = "light",
        route: Callable[[Route], None] | None = None,
        clock: bool = False,
        locale: str = "en-US",
    ) -> Visit:
        """Load a page; a route answers in place of a server. With a clock it begins in the
        ``MORNING``, and the test may stop it at ``NOON``.
        """
        context = self._browser.new_context(
            viewport={"width": view.width, "height": view.height},
            device_scale_factor=view.scale,
            is_mobile=view.is_phone,
            has_touch=view.is_phone,
            color_scheme=scheme,
            # Else it is the machine's, and that of one without a language is no name of any.
            locale=locale,
        )
        context.set_default_timeout(WAIT_MILLISECONDS)
        visit = Visit(context.new_page())
        self._all.append(visit)
        if route is not None:
            context.route("**/*", route)
        if clock:
            visit.page.clock.install(time=MORNING)
        visit.page.goto(url)
        return visit

    def close(self) -> None:
        """Nobody may have complained, or asked for something of another server."""
        for visit in self._all:
            origin = visit.page.evaluate("location.origin")
            visit.page.context.close()
            assert not visit.complaints, visit.complaints
            elsewhere = [path for path in visit.list_paths(origin) if not path.startswith("/")]
            assert not elsewhere, elsewhere


# All that axe knows in one scheme at each size, and the contrast in the other where most is shown.
LOOKS: Final[tuple[tuple[str, Scheme, bool], ...]] = (
    ("narrow", "dark", False),
    ("phone", "light", False),
    ("zoomed", "dark", False),
    ("laptop", "light", False),
    ("laptop", "dark", True),
)


def list_barriers(page: Page, axe: str, *, is_contrast_alone: bool = False) -> list[str]:
    """What axe calls serious or critical for people with disabilities: its rule and where."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(axe)
    rules = ["color-contrast"] if is_contrast_alone else None
    found: list[dict[str, Any]] = page.evaluate(
        """(runOnly) => axe.run(document, {resultTypes: ['violations'], ...(runOnly && {runOnly})})
             .then((found) => found.violations)""",
        rules,
    )
    return [
        f"{rule['id']}: {node['html']} {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def fits_in_width(page: Page) -> bool:
    """Whether nothing makes the page wider than what it is looked at through."""
    size = page.viewport_size
    assert size
    return bool(page.evaluate("document.documentElement.scrollWidth") <= size["width"])


def check_looks(page: Page, axe: str) -> None:
    """A page that is loaded once, in every size and scheme: nothing is wider than the screen, and
    nothing keeps people with disabilities out.
    """
    for name, scheme, is_contrast_alone in LOOKS:
        view = VIEWS[name]
        page.set_viewport_size({"width": view.width, "height": view.height})
        page.emulate_media(color_scheme=scheme)
        assert fits_in_width(page), (page.url, name)
        barriers = list_barriers(page, axe, is_contrast_alone=is_contrast_alone)
        assert barriers == [], (page.url, name, scheme)


# To blur is not enough: the next stop would come after the element that had the focus.
START = (
    "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
)
STOP = """() => {
  const stop = document.activeElement;
  if (!stop || stop === document.body) return null;
  const style = getComputedStyle(stop), box = stop.getBoundingClientRect();
  const isSeen = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth
    && stop.checkVisibility({visibilityProperty: true, opacityProperty: true});
  const isFirstTime = !stop.wasStopAt;
  stop.wasStopAt = true;
  const name = stop.ariaLabel || stop.labels?.[0]?.innerText || stop.innerText || stop.title;
  return {
    name: (name || stop.id).trim(), isFirstTime, isSeen,
    hasRing: style.outlineStyle !== 'none' || style.boxShadow !== 'none',
  };
}"""
# What a mouse can use, and Tab did not stop at.
LEFT_OUT = """() => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex='0'], [onclick]")]
  .filter((each) => !each.wasStopAt && !each.disabled && each.type !== "file"
    && each.checkVisibility({visibilityProperty: true, opacityProperty: true}))
  .map((each) => each.outerHTML)"""


def read_stop(page: Page) -> dict[str, Any] | None:
    """What has the focus: it has to be seen, and to look different for that. None for nothing."""
    stop: dict[str, Any] | None = page.evaluate(STOP)
    if stop is not None:
        assert stop["isSeen"], f"the focus cannot be seen: {stop['name']}"
        assert stop["hasRing"], f"nothing shows the focus: {stop['name']}"
    return stop


def walk_by_keyboard(page: Page) -> list[str]:
    """The names of what the Tab key stops at from the start of the page on, in order: all that a
    mouse can use.
    """
    page.evaluate(START)
    names: list[str] = []
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        stop = read_stop(page)
        if stop is None or not stop["isFirstTime"]:
            assert page.evaluate(LEFT_OUT) == []
            return names
        names.append(stop["name"])
    raise AssertionError(f"no end after {MOST_STOPS} stops: {names}")


def go_to(page: Page, name: str, *, key: str = "Tab") -> None:
    """Press Tab, or Shift+Tab, until something of this name has the focus."""
    for _ in range(MOST_STOPS):
        page.keyboard.press(key)
        stop = read_stop(page)
        if stop is not None and stop["name"] == name:
            return
    raise AssertionError(f"Tab does not come to {name}")


def get_focus(page: Page) -> str:
    """The name of what has the focus, which has to be something that is seen."""
    stop = read_stop(page)
    assert stop is not None, "the focus was lost"
    return str(stop["name"])
