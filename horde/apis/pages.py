# SPDX-License-Identifier: AGPL-3.0-or-later
"""How a page for people is sent, and the page of whatever goes wrong in a browser."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flask import Response, make_response, render_template, request

from horde.apis.requests import get_config
from horde.apis.responses import JSON_TYPE
from horde.web.files import HEADERS, HTML_TYPE

PAGE_HEADERS: Final = {
    **HEADERS,
    "cache-control": "no-store",  # the page after registering shows a key
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "form-action 'none'", "form-action 'self'"
    ),
}

HEADINGS: Final[Mapping[int, str]] = MappingProxyType(
    {
        403: "Not allowed",
        404: "Not here",
        429: "Too many requests",
        500: "This server failed",
        503: "Not at the moment",
    }
)
# What the framework says of these is for programs, or nothing.
WORDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        404: "There is no page at this address.",
        429: "Too much was asked for from your address. Wait a minute, then reload this page.",
        500: "It was not your fault. Try again in a moment; if it goes on, tell the operator.",
    }
)


def render_page(template: str, status: int = 200, **values: object) -> Response:
    """A page with the headers that keep it private and inert."""
    config = get_config()
    page = render_template(
        template,
        title=config.title,
        about=config.about,
        contact_email=config.contact_email,
        front_url=config.front_url,
        repository=config.repository,
        origin=request.host_url.rstrip("/"),
        **values,
    )
    response = make_response(page, status)
    response.headers.update(PAGE_HEADERS)
    return response


def wants_page() -> bool:
    """Whether a person asks with a browser, and not for a route of the API, which programs read
    whatever they say they accept.
    """
    if f"{request.path}/".lower().startswith("/api/"):
        return False
    return request.accept_mimetypes.best_match((JSON_TYPE, HTML_TYPE)) == HTML_TYPE


def render_failure(status: int, problem: str | None = None) -> Response:
    """The page of a failure; without a problem it says what the status means."""
    return render_page(
        "failure.html",
        status,
        heading=HEADINGS.get(status, "Not like this"),
        problem=problem or WORDS.get(status, "This address cannot be opened like this."),
    )
