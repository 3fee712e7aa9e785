# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page on which a person makes an account. It works without JavaScript."""

from flask import Response, current_app, request, session
from flask.views import MethodView
from flask_restx import Api

from horde.actions.registration import find_alias_of, register_account
from horde.apis import pages
from horde.apis.requests import get_config
from horde.exceptions import Forbidden
from horde.limiter import limit_register
from horde.shapes.users import MAX_USERNAME_LENGTH
from horde.shown_text import clean_username, is_profane

DEFAULT_USERNAME = "Pseudonymous"
IDENTITY = "identity"  # of who signed in, in the session; there is none without a provider
MAX_FORM_BYTES = 16 * 1024


class Register(MethodView):
    """The form, and the account it makes."""

    def get(self) -> Response:
        """The empty form."""
        return render_page("register.html", 200)

    @limit_register
    def post(self) -> Response:
        """Make an account, or a new key for that of who signed in, and show the key, this once."""
        # Browsers say where a form was sent from; nothing else may make accounts in a visitor's
        # name.
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
            return render_page("register.html", 403, problem="Please send the form from this page.")
        request.max_content_length = MAX_FORM_BYTES
        username = clean_username(request.form.get("username", "")) or DEFAULT_USERNAME
        problem = find_username_problem(username)
        if problem is not None:
            return render_page("register.html", 400, problem=problem, username=username)
        try:
            made = register_account(username, session.get(IDENTITY))
        except Forbidden as refused:
            return render_page("register.html", 403, problem=refused.message)
        return render_page("registered.html", 200, alias=made.alias, api_key=made.api_key)


def find_username_problem(username: str) -> str | None:
    """What a person has to change about a cleaned name; None for a good one."""
    if len(username) > MAX_USERNAME_LENGTH:
        return f"The name may have at most {MAX_USERNAME_LENGTH} characters."
    if is_profane(username):
        return "Please choose another name."
    return None


def render_page(template: str, status: int, **values: object) -> Response:
    """A page of the site that knows who signed in."""
    config = get_config()
    identity = session.get(IDENTITY)
    return pages.render_page(
        template,
        status,
        provider=config.oidc_name if config.oidc_issuer else None,
        is_signed_in=identity is not None,
        own_alias=None if identity is None else find_alias_of(identity),
        max_length=MAX_USERNAME_LENGTH,
        **values,
    )


def register(api: Api) -> None:
    """Add the page to the application of the API."""
    app = api.app or current_app
    app.add_url_rule("/register", view_func=Register.as_view("register"))
