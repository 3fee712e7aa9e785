# SPDX-License-Identifier: AGPL-3.0-or-later
"""Sign-in with a provider: accounts that are found again, and everything a sign-in may not do."""

import base64
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from flask import Flask
from flask.testing import FlaskClient
from joserfc.jwk import RSAKey

from devtools.services import ServiceAddresses
from horde.app import RESOURCE_MODULES
from horde.classes.base.user import User
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator
from tests.integration.oidc_provider import CLIENT_ID, CLIENT_SECRET, Provider, running_provider
from tests.integration.rows import own_horde

PUBLIC_URL = "https://horde.example.org"


@pytest.fixture(scope="module")
def issued() -> Iterator[Provider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses, issued: Provider) -> Iterator[Flask]:
    settings = {
        "oidc_issuer": issued.issuer,
        "oidc_client_id": CLIENT_ID,
        "oidc_client_secret": CLIENT_SECRET,
        "oidc_name": "Our Club",
        "public_url": PUBLIC_URL,
    }
    with own_horde(service_urls, "sign_in", RESOURCE_MODULES, **settings) as app:
        yield app


@pytest.fixture
def provider(app: Flask, issued: Provider) -> Provider:
    """The provider as it behaves by default."""
    fresh = Provider(issuer=issued.issuer, key=issued.key)
    for name, value in vars(fresh).items():
        setattr(issued, name, value)
    return issued


class Browser:
    """A person's browser: it keeps cookies and follows redirects, to the provider and back."""

    def __init__(self, app: Flask) -> None:
        self.client: FlaskClient = app.test_client()

    def get(self, path: str) -> Any:
        return self.client.get(path, base_url=PUBLIC_URL)

    def post(self, path: str, **form: str) -> Any:
        return self.client.post(path, data=form, base_url=PUBLIC_URL)

    def go_to_provider(self) -> str:
        """Where the provider sends the person back to."""
        answer = self.get("/sign-in")
        assert answer.status_code == 302, answer.data
        back = httpx.get(answer.location).headers["location"]
        assert back.startswith(f"{PUBLIC_URL}/sign-in/finish?")
        return str(back.removeprefix(PUBLIC_URL))

    def sign_in(self) -> Any:
        return self.get(self.go_to_provider())


def read_account(page: Any) -> tuple[str, str]:
    """(alias, key) that a page shows."""
    assert page.status_code == 200, page.data
    alias = re.search(r"Your account is ([^<]+)<", page.text)
    key = re.search(r'class="key"[^>]*>([^<]+)<', page.text)
    assert alias
    assert key
    return alias[1], key[1]


def find(app: Flask, key: str) -> Any:
    return Api(app).get("/find_user", key)


def test_a_person_who_signs_in_gets_an_account_and_later_a_new_key_for_it(
    app: Flask, provider: Provider
) -> None:
    browser = Browser(app)
    answer = browser.sign_in()
    assert (answer.status_code, answer.location) == (302, "/register")
    assert "You are signed in" in browser.get("/register").text
    alias, key = read_account(browser.post("/register", username="Ann"))
    assert find(app, key).json["username"] == alias
    assert find(app, key).json["pseudonymous"] is False

    later = Browser(app)
    later.sign_in()
    assert alias in later.get("/register").text
    again, new_key = read_account(later.post("/register"))
    assert again == alias
    assert find(app, new_key).json["username"] == alias
    assert find(app, key).status_code == 404


def test_two_persons_have_two_accounts(app: Flask, provider: Provider) -> None:
    aliases = set()
    for subject in ("person 2", "person 3"):
        provider.subject = subject
        browser = Browser(app)
        browser.sign_in()
        aliases.add(read_account(browser.post("/register", username="Bob"))[0])
    assert len(aliases) == 2


def test_what_is_stored_and_sent_says_nothing_of_the_person(app: Flask, provider: Provider) -> None:
    provider.subject = "ann@example.org"
    browser = Browser(app)
    browser.sign_in()
    alias, _ = read_account(browser.post("/register", username="Cleo"))
    with transaction() as session:
        stored = session.get_one(User, int(alias.rpartition("#")[2])).oauth_id
    assert re.fullmatch(r"o_[0-9a-f]{48}", stored)
    cookie = browser.client.get_cookie("horde_sign_in", domain="horde.example.org")
    assert cookie is not None
    payload = cookie.value.partition(".")[0]
    kept = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert kept == {"identity": stored}
    assert (cookie.http_only, cookie.secure, cookie.same_site) == (True, True, "Lax")


def test_the_horde_proves_to_the_provider_who_it_is(app: Flask, provider: Provider) -> None:
    Browser(app).sign_in()
    sent = provider.token_requests[-1]
    assert sent["authorization"].startswith("Basic ")
    assert sent["code_verifier"]


def test_without_signing_in_an_account_is_pseudonymous_as_before(
    app: Flask, provider: Provider
) -> None:
    browser = Browser(app)
    assert "Sign in with Our Club" in browser.get("/register").text
    _, key = read_account(browser.post("/register", username="Dora"))
    assert find(app, key).json["pseudonymous"] is True


def test_signing_out_forgets_who_it_was(app: Flask, provider: Provider) -> None:
    browser = Browser(app)
    browser.sign_in()
    assert browser.get("/sign-out").status_code == 405
    assert browser.post("/sign-out").location == "/register"
    assert "You are signed in" not in browser.get("/register").text


def test_in_a_raid_who_signed_in_may_register_and_nobody_else(
    app: Flask, provider: Provider
) -> None:
    api, (_, moderator) = Api(app), make_moderator()
    provider.subject = "a raid's guest"
    browser = Browser(app)
    browser.sign_in()
    api.put("/status/modes", {"raid_mode": True}, moderator)
    try:
        assert Browser(app).post("/register", username="Eve").status_code == 403
        read_account(browser.post("/register", username="Guest"))
    finally:
        api.put("/status/modes", {"raid_mode": False}, moderator)


# What does not sign anybody in


def refuse(browser: Browser, answer: Any, status: int) -> None:
    """The answer is a page, and nobody is signed in."""
    assert answer.status_code == status, answer.data
    assert answer.content_type.startswith("text/html")
    assert "You are signed in" not in browser.get("/register").text


def test_an_answer_that_nobody_asked_for_is_refused(app: Flask, provider: Provider) -> None:
    asked = Browser(app)
    back = asked.go_to_provider()
    other = Browser(app)
    refuse(other, other.get(back), 400)
    for path in ("/sign-in/finish", "/sign-in/finish?code=x&state=y", "/sign-in/finish?state="):
        refuse(asked, asked.get(path), 400)


def test_a_code_is_redeemed_once(app: Flask, provider: Provider) -> None:
    browser = Browser(app)
    back = browser.go_to_provider()
    assert browser.get(back).status_code == 302
    browser.post("/sign-out")
    refuse(browser, browser.get(back), 400)


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"aud": "another horde"},
        {"iss": "https://elsewhere.example.org"},
        {"exp": 1_000_000_000},
        {"sub": None},
    ],
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    app: Flask, provider: Provider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    browser = Browser(app)
    refuse(browser, browser.sign_in(), 400)


def test_a_token_signed_by_somebody_else_is_refused(app: Flask, provider: Provider) -> None:
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "one"})
    browser = Browser(app)
    refuse(browser, browser.sign_in(), 400)


def test_an_answer_without_a_token_is_refused(app: Flask, provider: Provider) -> None:
    provider.leaves_out_id_token = True
    browser = Browser(app)
    refuse(browser, browser.sign_in(), 400)


def test_a_person_who_says_no_is_told_so(app: Flask, provider: Provider) -> None:
    provider.is_denying = True
    browser = Browser(app)
    refuse(browser, browser.sign_in(), 400)


def test_a_provider_that_fails_is_a_page_and_its_words_stay_out_of_the_log(
    app: Flask, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    browser = Browser(app)
    back = browser.go_to_provider()
    provider.is_broken = True
    with caplog.at_level(logging.INFO):
        refuse(browser, browser.get(back), 503)
    assert CLIENT_SECRET not in caplog.text
    assert "horde.sign_in.failed" in caplog.text


def test_a_cookie_of_ones_own_making_signs_nobody_in(app: Flask, provider: Provider) -> None:
    browser = Browser(app)
    browser.client.set_cookie(
        "horde_sign_in", "eyJpZGVudGl0eSI6ICJvXzEifQ.x.y", domain="horde.example.org"
    )
    assert "You are signed in" not in browser.get("/register").text


def test_a_horde_without_a_provider_has_no_sign_in(service_urls: ServiceAddresses) -> None:
    with own_horde(service_urls, "no_sign_in", RESOURCE_MODULES) as app:
        for path in ("/sign-in", "/sign-in/finish"):
            assert app.test_client().get(path).status_code == 404
        assert "Sign in" not in app.test_client().get("/register").text
