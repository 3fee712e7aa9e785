# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages of this horde for people: what it is and does, its models and workers, the account.

They work without JavaScript where they only show; parts that stay live are fetched again as pages.
Their figures come from the caches that the JSON routes use.
"""

import json
import shlex
from functools import partial
from typing import Final

from flask import (
    Blueprint,
    Response,
    current_app,
    jsonify,
    make_response,
    request,
)
from flask_restx import Api
from markupsafe import Markup

from horde.actions.account import FLOW_DAYS, renew_own_key, show_own_account
from horde.actions.documents import list_news, show_document
from horde.actions.site import LEADERS, find_model, show_best_workers, show_horde, show_workers
from horde.actions.statistics import show_text_models
from horde.actions.teams import list_teams, show_team
from horde.actions.users import list_users
from horde.apis.pages import render_failure, render_page
from horde.apis.requests import get_config, require_api_key
from horde.apis.responses import PRIVATE
from horde.exceptions import NotFound
from horde.json_text import JsonObject
from horde.limiter import exempt_from_limits, limit_register
from horde.shapes.documents import DocumentFormat, DocumentName
from horde.shapes.users import ANONYMOUS_KEY, UserSort, UsersQuery
from horde.web.files import HEADERS, read_static_files

NEWS_SHOWN: Final = 3
MOST_MODELS: Final = 100  # of a page; the list of the API has all
MOST_TEAMS: Final = 200
ASK_BODY: Final[JsonObject] = {
    "messages": [{"role": "user", "content": "Name three fruits."}],
    "max_tokens": 64,
}

pages = Blueprint("site", __name__)


@pages.get("/")
def index() -> Response:
    """What this horde is, what it does now, and how to join."""
    found = show_horde()
    chat_model = next((line.name for line in found.models if "chat" in line.kinds), "MODEL")
    return render_page(
        "index.html",
        totals=found.totals,
        modes=found.modes,
        models=found.models[:MOST_MODELS],
        more_models=max(0, len(found.models) - MOST_MODELS),
        news=list_news(get_config())[:NEWS_SHOWN],
        rules=Markup(show_document(get_config(), DocumentName.TERMS, DocumentFormat.HTML).html),
        commands=build_commands(request.host_url.rstrip("/"), chat_model),
    )


def build_commands(origin: str, chat_model: str) -> dict[str, str]:
    """Commands for a shell that work at this address as they are, but for KEY, ID and URL."""
    body = shlex.quote(json.dumps({"model": chat_model, **ASK_BODY}))
    headers = f"-H 'Content-Type: application/json' -H 'apikey: {ANONYMOUS_KEY}'"
    return {
        "ask": f"curl -s {origin}/api/v2/generate/chat/async {headers} -d {body}",
        "follow": f"curl -s {origin}/api/v2/generate/chat/status/ID",
        "bridge": (
            f"horde bridge --api {origin}/api --key KEY --backend URL/v1 --name 'My worker'"
        ),
    }


@pages.get("/models/<path:name>")
def model(name: str) -> Response:
    """One model: who serves it, what they declare, and what a reply costs."""
    found = find_model(name)
    if found is None:
        return render_failure(404, "Nobody serves a model of this name.")
    return render_page(
        "model.html",
        model=found.model,
        offer=found.offer,
        price=found.price,
        workers=found.workers,
        more_workers=found.worker_count - len(found.workers),
    )


@pages.get("/workers")
def workers() -> Response:
    """The workers that are online, a page at a time."""
    found = show_workers(request.args.get("page", 1, type=int))
    return render_page(
        "workers.html",
        workers=found.workers,
        count=found.worker_count,
        page=found.page,
        pages=found.page_count,
    )


@pages.get("/teams")
def teams() -> Response:
    """The teams, those who did most first."""
    found = sorted(list_teams().read(), key=lambda team: -team["kudos"])
    return render_page("teams.html", teams=found[:MOST_TEAMS], count=len(found))


@pages.get("/teams/<team_id>")
def team(team_id: str) -> Response:
    """A team: its workers and what they serve."""
    try:
        return render_page("team.html", team=show_team(None, team_id))
    except NotFound:
        return render_failure(404, "There is no such team.")


@pages.get("/leaders")
def leaders() -> Response:
    """Who gave most: accounts, workers that are online, teams and models."""
    best_teams = sorted(list_teams().read(), key=lambda each: -each["kudos"])
    models = sorted(show_text_models().read()["month"].items(), key=lambda item: -item[1])
    return render_page(
        "leaders.html",
        users=list_users(UsersQuery(sort=UserSort.KUDOS)).read()[:LEADERS],
        workers=show_best_workers(),
        teams=best_teams[:LEADERS],
        models=models[:LEADERS],
    )


@pages.get("/news")
def news() -> Response:
    """What the operator has told, the newest first."""
    return render_page("news.html", news=list_news(get_config()))


def show(name: DocumentName) -> Response:
    """A document of the operator, whose Markdown holds no HTML."""
    document = show_document(get_config(), name, DocumentFormat.HTML)
    return render_page("document.html", name=name.value, body=Markup(document.html))


for _name in DocumentName:
    pages.add_url_rule(f"/{_name.value}", _name.value, partial(show, _name))


@pages.get("/account")
def account() -> Response:
    """The account of a key that the page asks for; the key never comes here but in a header."""
    return render_page("account.html", flow_days=FLOW_DAYS)


@pages.get("/account/overview")
def overview() -> Response:
    """What the account of the key has, gains and spends."""
    return answer_privately(show_own_account(require_api_key()))


@pages.post("/account/key")
@limit_register
def new_key() -> Response:
    """`{api_key}`: a new key in place of the caller's, which ends."""
    return answer_privately({"api_key": renew_own_key(require_api_key())})


def answer_privately(body: JsonObject) -> Response:
    """JSON that only its asker may keep."""
    response = jsonify(body)
    response.headers.update(PRIVATE)
    return response


def serve_static(name: str) -> Response:
    """A file of the pages."""
    file = STATIC_FILES.get(name)
    if file is None:
        return render_failure(404, "There is no such file.")
    is_known = file.is_known(request.headers.get("If-None-Match", ""))
    response = make_response(b"" if is_known else file.content, 304 if is_known else 200)
    response.headers.update({**HEADERS, "content-type": file.kind, "etag": file.tag})
    return response


STATIC_FILES: Final = read_static_files()
pages.add_url_rule("/pages/<name>", "static", exempt_from_limits(serve_static))


def register(api: Api) -> None:
    """Add the pages to the application of the API."""
    (api.app or current_app).register_blueprint(pages)
