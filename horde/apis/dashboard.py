# SPDX-License-Identifier: AGPL-3.0-or-later
"""The operator's dashboard: a page that asks for a moderator's key, and what it shows."""

from flask import Blueprint, Response, current_app
from flask_restx import Api

from horde.actions.dashboard import Window, show_moment, show_series
from horde.apis.bodies import read_query
from horde.apis.pages import render_page
from horde.apis.requests import require_api_key
from horde.apis.responses import JSON_TYPE, PRIVATE
from horde.shapes.base import Query

pages = Blueprint("dashboard", __name__)


class SeriesQuery(Query):
    """The query string of the series."""

    window: Window = Window.HOUR


@pages.get("/dashboard")
def dashboard() -> Response:
    """The page; without a key it shows a form for one."""
    return render_page("dashboard.html")


@pages.get("/dashboard/moment")
def moment() -> Response:
    """The queue, the workers and the health of the parts, for moderators."""
    return answer_privately(show_moment(require_api_key()))


@pages.get("/dashboard/series")
def series() -> Response:
    """Figures of the last hour or day, for moderators."""
    return answer_privately(show_series(require_api_key(), read_query(SeriesQuery).window))


def answer_privately(body: bytes) -> Response:
    """JSON that only its asker may keep."""
    return Response(body, content_type=JSON_TYPE, headers=PRIVATE)


def register(api: Api) -> None:
    """Add the page to the application of the API."""
    (api.app or current_app).register_blueprint(pages)
