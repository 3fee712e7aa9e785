# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages of this horde for people: what it is and does, its models and workers, the account.

They work without JavaScript where they only show; parts that stay live are fetched again as pages.
Their figures come from the caches that the JSON routes use.
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any, Final

from flask import (
    Blueprint,
    Response,
    current_app,
    jsonify,
    make_response,
    render_template,
    request,
)
from flask_restx import Api
from markupsafe import Markup
from sqlalchemy.orm import Session

from horde import clock
from horde.actions.account import renew_own_key, show_own_account
from horde.actions.documents import list_news, show_document
from horde.actions.statistics import show_text_models
from horde.actions.teams import list_teams, show_team
from horde.actions.users import list_users
from horde.apis.requests import get_config, require_api_key
from horde.apis.responses import PRIVATE
from horde.classes.base.user import ANONYMOUS_KEY
from horde.classes.kobold.pricing import compute_text_quote, round_quote
from horde.database.account_overview import FLOW_DAYS
from horde.database.stats import (
    HordeTotals,
    ModelFigures,
    get_horde_modes,
    get_model_figures,
    get_totals,
)
from horde.database.text_functions import ChatModelOffer, get_chat_model_offers
from horde.database.workers import get_online_workers
from horde.db import reading
from horde.exceptions import NotFound
from horde.limiter import exempt_from_limits, limit_register
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.shapes.documents import DocumentFormat, DocumentName
from horde.shapes.users import UserSort, UsersQuery
from horde.web.files import HEADERS, read_static_files

NEWS_SHOWN: Final = 3
MOST_MODELS: Final = 100  # of a page; the list of the API has all
WORKERS_A_PAGE: Final = 100
MOST_TEAMS: Final = 200
LEADERS: Final = 25
PRICED_TOKENS: Final = 512
PRICED_CONTEXT_TOKENS: Final = 2048
ASK_BODY: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Name three fruits."}],
    "max_tokens": 64,
}

PAGE_HEADERS: Final = {
    **HEADERS,
    "cache-control": "no-store",  # the page after registering shows a key
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "form-action 'none'", "form-action 'self'"
    ),
}

pages = Blueprint("site", __name__, template_folder="templates")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """A model as a page shows it."""

    name: str
    kinds: tuple[str, ...]  # "text", "chat"
    workers: int  # of either kind, those that do both counted once at most
    speed: float  # tokens a second
    jobs: float
    eta: int  # seconds


def build_model_line(
    figures: ModelFigures | None, offer: ChatModelOffer | None, name: str
) -> ModelLine:
    """One model from what text and chat say about it."""
    text_count = figures.count if figures is not None else 0
    chat_count = offer.workers if offer is not None else 0
    kinds = [kind for kind, count in (("text", text_count), ("chat", chat_count)) if count]
    return ModelLine(
        name=name,
        kinds=tuple(kinds),
        workers=max(text_count, chat_count),
        speed=figures.performance if figures is not None else 0.0,
        jobs=figures.jobs if figures is not None else 0.0,
        eta=figures.eta if figures is not None else 0,
    )


def list_model_lines(
    figures: dict[str, ModelFigures], offers: dict[str, ChatModelOffer]
) -> list[ModelLine]:
    """Every served model, those with the most workers first."""
    served = {name for name, model in figures.items() if model.is_served} | offers.keys()
    lines = [build_model_line(figures.get(name), offers.get(name), name) for name in served]
    return sorted(lines, key=lambda line: (-line.workers, line.name.casefold()))


def render_page(template: str, status: int = 200, **values: object) -> Response:
    """A page with the headers that keep it private and inert."""
    config = get_config()
    page = render_template(
        template,
        title=config.title,
        about=config.about,
        contact_email=config.contact_email,
        front_url=config.front_url,
        origin=request.host_url.rstrip("/"),
        **values,
    )
    response = make_response(page, status)
    response.headers.update(PAGE_HEADERS)
    return response


@pages.get("/")
def index() -> Response:
    """What this horde is, what it does now, and how to join."""
    now = clock.utcnow()
    with reading() as session:
        totals: HordeTotals = get_totals(session, now)
        modes = get_horde_modes(session)
        lines = list_model_lines(
            get_model_figures(session, now), get_chat_model_offers(session, now)
        )
    chat_model = next((line.name for line in lines if "chat" in line.kinds), "MODEL")
    return render_page(
        "index.html",
        totals=totals,
        modes=modes,
        models=lines[:MOST_MODELS],
        more_models=max(0, len(lines) - MOST_MODELS),
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
    now = clock.utcnow()
    with reading() as session:
        figures = get_model_figures(session, now).get(name)
        offer = get_chat_model_offers(session, now).get(name)
        online = list_online_workers(session)
    is_served = offer is not None or (figures is not None and figures.is_served)
    if not is_served and not is_known_text_model(name):
        return render_page("missing.html", 404, problem="Nobody serves a model of this name.")
    serving = [worker for worker in online if name in worker["models"]]
    quote = compute_text_quote(
        max_length=PRICED_TOKENS,
        max_context_length=PRICED_CONTEXT_TOKENS,
        models=[(get_text_model_multiplier(name), is_known_text_model(name))],
        n=1,
    )
    return render_page(
        "model.html",
        model=build_model_line(figures, offer, name),
        offer=offer,
        price=round_quote(quote),
        workers=serving[:WORKERS_A_PAGE],
        more_workers=max(0, len(serving) - WORKERS_A_PAGE),
    )


@pages.get("/workers")
def workers() -> Response:
    """The workers that are online, a page at a time."""
    with reading() as session:
        online = list_online_workers(session)
    page_count = max(1, math.ceil(len(online) / WORKERS_A_PAGE))
    page = min(max(1, request.args.get("page", 1, type=int)), page_count)
    return render_page(
        "workers.html",
        workers=online[(page - 1) * WORKERS_A_PAGE : page * WORKERS_A_PAGE],
        count=len(online),
        page=page,
        pages=page_count,
    )


def list_online_workers(session: Session) -> list[dict[str, Any]]:
    """The workers that are online, as everybody sees them."""
    listed = get_online_workers(session, clock.utcnow(), is_privileged=False)
    workers: list[dict[str, Any]] = listed.read()
    return workers


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
        return render_page("missing.html", 404, problem="There is no such team.")


@pages.get("/leaders")
def leaders() -> Response:
    """Who gave most: accounts, workers that are online, teams and models."""
    with reading() as session:
        workers = list_best_workers(list_online_workers(session))
    best_teams = sorted(list_teams().read(), key=lambda each: -each["kudos"])
    models = sorted(show_text_models().read()["month"].items(), key=lambda item: -item[1])
    return render_page(
        "leaders.html",
        users=list_users(UsersQuery(sort=UserSort.KUDOS)).read()[:LEADERS],
        workers=workers,
        teams=best_teams[:LEADERS],
        models=models[:LEADERS],
    )


def list_best_workers(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those who earned most, the best first."""
    return nlargest(LEADERS, workers, key=lambda worker: worker["kudos_rewards"])


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


def answer_privately(body: dict[str, Any]) -> Response:
    """JSON that only its asker may keep."""
    response = jsonify(body)
    response.headers.update(PRIVATE)
    return response


def serve_static(name: str) -> Response:
    """A file of the pages."""
    file = STATIC_FILES.get(name)
    if file is None:
        return render_page("missing.html", 404, problem="There is no such file.")
    is_known = file.is_known(request.headers.get("If-None-Match", ""))
    response = make_response(b"" if is_known else file.content, 304 if is_known else 200)
    response.headers.update({**HEADERS, "content-type": file.kind, "etag": file.tag})
    return response


STATIC_FILES: Final = read_static_files()
pages.add_url_rule("/pages/<name>", "static", exempt_from_limits(serve_static))


def register(api: Api) -> None:
    """Add the pages to the application of the API."""
    (api.app or current_app).register_blueprint(pages)
