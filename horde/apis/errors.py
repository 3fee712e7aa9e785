# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every failure of the API as JSON: refusals with their code, the framework's own, and what nobody
foresaw. A person who opens a page in a browser gets a page.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Flask, Response, request
from flask_restx import Api
from werkzeug.exceptions import HTTPException

from horde import tally
from horde.apis.pages import render_failure, wants_page
from horde.exceptions import HordeError
from horde.logger import build_failure_fields, get_logger
from horde.remedies import add_remedy
from horde.return_codes import ReturnCode

logger = get_logger(__name__)

type Answer = tuple[dict[str, Any], int, dict[str, str]]

INTERNAL_SERVER_ERROR = "Internal Server Error"
# They describe the HTML page that werkzeug would send.
_HEADERS_OF_THE_PAGE = {"content-type", "content-length"}


def register_error_handlers(app: Flask, api: Api) -> None:
    """Answer failures inside resources (restx) and outside of them (Flask) alike.

    restx takes the first handler whose class fits, so the order is from the narrow to the wide.
    """
    for error_class, answer in (
        (HordeError, answer_horde_error),
        (HTTPException, answer_http_exception),
        (Exception, answer_unexpected),
    ):
        app.register_error_handler(error_class, partial(answer_page_or_json, answer))
        api.errorhandler(error_class)(answer)


def answer_page_or_json(answer: Callable[[Any], Answer], error: Exception) -> Answer | Response:
    """What `answer` makes of an error outside of the API's resources, as a page for a browser.

    The words of a refusal are for people too; those of the framework are not.
    """
    body, status, headers = answer(error)
    if not wants_page():
        return body, status, headers
    page = render_failure(status, body["message"] if isinstance(error, HordeError) else None)
    page.headers.update(headers)
    return page


def answer_horde_error(error: HordeError) -> Answer:
    """`{message, rc, **extra}` under the error's status; no `rc` when it has none.

    The message says what to do as well.
    """
    tally.count(f"{tally.REFUSED}{error.rc or error.status}")
    code = {} if error.rc is None else {"rc": str(error.rc)}
    return (
        {"message": add_remedy(error.message, error.rc), **code, **error.extra},
        error.status,
        {},
    )


def answer_http_exception(error: HTTPException) -> Answer:
    """`{message}` with the headers that belong to the status, such as `Allow`.

    A 400 of the framework carries `BadRequest`, as every refusal of a request that can never be
    served.
    """
    status = error.code or 500
    tally.count(f"{tally.REFUSED}{status}")
    if status >= 500 and not hasattr(error, "data"):
        return {"message": error.name}, status, {}
    body: dict[str, Any] = {"message": error.description or error.name}
    if status == 400:
        body["rc"] = str(ReturnCode.BAD_REQUEST)
    # restx sends the error's `data` instead of what its handler answers, so the code has to be in
    # there too.
    if isinstance(data := getattr(error, "data", None), dict):
        body = {**body, **data}
        error.data = body  # type: ignore[attr-defined]
    headers = {
        name: value
        for name, value in error.get_headers()
        if name.lower() not in _HEADERS_OF_THE_PAGE
    }
    return body, status, headers


def answer_unexpected(error: Exception) -> Answer:
    """500 without a detail; where it happened goes to the log.

    The error's own text stays out of the log: it may quote a prompt, a key or a row.
    """
    logger.error(
        "horde.request.failed",
        extra={
            "method": request.method,
            "route": str(request.url_rule) if request.url_rule else None,
            **build_failure_fields(error),
        },
    )
    return {"message": INTERNAL_SERVER_ERROR}, 500, {}
