# SPDX-License-Identifier: AGPL-3.0-or-later
"""Sign-in with one OpenID Connect provider, for people who want to find their account again.

Loaded only where the settings name a provider: its libraries are of use nowhere else. The session
cookie is signed and holds who signed in, as a hash, and nothing else of the person.
"""

import hashlib
import hmac

from authlib.common.errors import AuthlibBaseError
from authlib.integrations.flask_client import OAuth
from flask import Flask, Response, redirect, session
from joserfc.errors import JoseError
from requests.exceptions import RequestException
from werkzeug.wrappers import Response as AnyResponse

from horde.apis.register import IDENTITY, render_page
from horde.config import Config
from horde.logger import get_logger

logger = get_logger(__name__)

PROVIDER = "provider"
PROVIDER_SECONDS = 5.0
IDENTITY_PREFIX = "o_"
IDENTITY_DIGITS = 48  # with its prefix as long as the column


def install(app: Flask, config: Config) -> None:
    """Add the routes, and sessions for them."""
    app.secret_key = hmac.digest(config.secret_key.encode(), b"session", hashlib.sha256)
    app.config.update(
        SESSION_COOKIE_NAME="horde_sign_in",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=config.public_url.startswith("https://"),
    )
    oauth = OAuth(app)
    oauth.register(
        PROVIDER,
        client_id=config.oidc_client_id,
        client_secret=config.oidc_client_secret,
        server_metadata_url=f"{config.oidc_issuer}/.well-known/openid-configuration",
        client_kwargs={
            "scope": "openid",
            "code_challenge_method": "S256",
            "default_timeout": PROVIDER_SECONDS,
        },
    )

    # Providers differ in whether their name ends in a slash; the settings drop it.
    issuers = [config.oidc_issuer, f"{config.oidc_issuer}/"]

    def start() -> AnyResponse:
        """Send the person to the provider."""
        try:
            target: AnyResponse = oauth.provider.authorize_redirect(
                f"{config.public_url}/sign-in/finish"
            )
        except (AuthlibBaseError, RequestException, ValueError) as error:
            return answer_failure(error, 503)
        return target

    def finish() -> AnyResponse:
        """Take the provider's word for who the person is."""
        try:
            token = oauth.provider.authorize_access_token(
                claims_options={"iss": {"essential": True, "values": issuers}}
            )
            subject = str((token.get("userinfo") or {})["sub"])
        except RequestException as error:
            return answer_failure(error, 503)
        except (AuthlibBaseError, JoseError, KeyError, ValueError) as error:
            return answer_failure(error, 400)
        session.clear()
        session[IDENTITY] = build_identity(config.oidc_issuer, subject)
        return redirect("/register")

    def end() -> AnyResponse:
        """Forget who signed in."""
        session.clear()
        return redirect("/register")

    app.add_url_rule("/sign-in", "sign_in", start)
    app.add_url_rule("/sign-in/finish", "sign_in_finish", finish)
    app.add_url_rule("/sign-out", "sign_out", end, methods=["POST"])


def build_identity(issuer: str, subject: str) -> str:
    """Who a person is to this horde: nobody can read the provider's own name for them back."""
    digest = hashlib.sha256(f"{issuer}\n{subject}".encode()).hexdigest()
    return f"{IDENTITY_PREFIX}{digest[:IDENTITY_DIGITS]}"


def answer_failure(error: Exception, status: int) -> Response:
    """A page that says so.

    What the provider said may hold secrets, so its class alone is logged.
    """
    logger.warning("horde.sign_in.failed", extra={"error_class": type(error).__name__})
    problem = (
        "The sign-in cannot be reached at the moment. Please try again later."
        if status == 503
        else "The sign-in was not completed. Please try again."
    )
    return render_page("register.html", status, problem=problem)
