# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page of the Swagger document, and the bodies that it offers to send."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde.apis.document import EXAMPLES
from horde.apis.site import STATIC_FILES
from horde.app import RESOURCE_MODULES
from horde.classes.base.user import UserRoleTypes
from tests.integration._fake_chat_worker import build_pop_body
from tests.integration.rows import make_user, own_horde


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "document", RESOURCE_MODULES, test_apikeys=True) as app:
        yield app


@pytest.fixture(scope="module")
def document(app: Flask) -> dict[str, Any]:
    answer: dict[str, Any] = app.test_client().get("/api/swagger.json").json
    return answer


@pytest.mark.parametrize("path", ["/api", "/api/"])
def test_the_page_answers_with_and_without_the_slash(app: Flask, path: str) -> None:
    """`GET /api` was documented and 404."""
    answer = app.test_client().get(path)
    assert (answer.status_code, answer.mimetype) == (200, "text/html")
    assert "<title>API · Horde</title>" in answer.text
    assert "/api/swagger.json" in answer.text
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert "<style" not in answer.text
    assert app.test_client().head(path).status_code == 200


def test_the_page_lists_every_route_once_by_topic(app: Flask, document: dict[str, Any]) -> None:
    answer = app.test_client().get("/api/")
    operations = [
        operation
        for methods in document["paths"].values()
        for operation in methods.values()
        if isinstance(operation, dict)
    ]
    shown = re.findall(r'class="operation" id="([^"]+)"', answer.text)
    assert sorted(shown) == sorted(operation["operationId"] for operation in operations)
    titles = re.findall(r'<h2 id="topic-\d+-title">([^<]+)</h2>', answer.text)
    assert {title.lower() for title in titles} == {each["tags"][0] for each in operations}
    assert not {"default", "v2/generate"} & {title.lower() for title in titles}
    files = ("horde.css", "site.css", "site.js", "parts.js", "session.js", "api.js")
    first_load = len(answer.data) + sum(len(STATIC_FILES[name].content) for name in files)
    assert first_load < 150_000


def test_every_body_of_the_document_has_an_example(document: dict[str, Any]) -> None:
    bodies = {
        parameter["schema"]["$ref"].rpartition("/")[2]
        for methods in document["paths"].values()
        for operation in methods.values()
        if isinstance(operation, dict)
        for parameter in operation.get("parameters", [])
        if parameter["in"] == "body"
    }
    assert bodies == EXAMPLES.keys()
    for name in bodies:
        definition = document["definitions"][name]
        assert definition["example"].keys() <= definition["properties"].keys()


class Page:
    """Sends what "Try it out" would: the example of the body that the document names for a path."""

    def __init__(self, app: Flask, document: dict[str, Any]) -> None:
        self.app, self.document = app, document
        self.user_id, self.key = make_user(UserRoleTypes.TRUSTED, kudos=10_000)

    def try_out(
        self, method: str, path: str, *, key: str | None = None, filled: str = "", **edits: Any
    ) -> TestResponse:
        """The answer; `filled` takes the place of the path's parameter."""
        operation = self.document["paths"][path][method]
        body = next(each for each in operation["parameters"] if each["in"] == "body")
        example = self.document["definitions"][body["schema"]["$ref"].rpartition("/")[2]]["example"]
        address = "/api" + path.partition("{")[0] + filled
        headers = {"apikey": key or self.key}
        return self.app.test_client().open(
            address, method=method, json={**example, **edits}, headers=headers
        )


@pytest.fixture
def page(app: Flask, document: dict[str, Any]) -> Page:
    return Page(app, document)


def test_a_text_request_as_offered_is_queued_popped_and_answered(page: Page) -> None:
    popped = page.try_out("post", "/v2/generate/text/pop")
    assert popped.status_code == 200, popped.json
    asked = page.try_out("post", "/v2/generate/text/async")
    assert asked.status_code == 202, asked.json
    job = page.try_out("post", "/v2/generate/text/pop").json
    assert job["id"] is not None, job
    answered = page.try_out("post", "/v2/generate/text/submit", id=job["id"])
    assert answered.status_code == 200, answered.json
    name = EXAMPLES["PopInputKobold"]["name"]
    worker = page.app.test_client().get(f"/api/v2/workers/name/{name}").json
    changed = page.try_out("put", "/v2/workers/{worker_id}", filled=worker["id"])
    assert changed.status_code == 200, changed.json


def test_a_chat_as_offered_is_accepted(page: Page, app: Flask) -> None:
    body = build_pop_body(name="A chat worker")
    headers = {"apikey": page.key}
    popped = app.test_client().post("/api/v2/generate/text/pop", json=body, headers=headers)
    assert popped.status_code == 200, popped.json
    page.document = app.test_client().get("/api/swagger.json").json
    asked = page.try_out("post", "/v2/generate/chat/async")
    assert asked.status_code == 202, asked.json


@pytest.mark.parametrize(
    ("path", "rc"),
    [
        ("/v2/generate/text/submit", "InvalidJobID"),
        ("/v2/generate/text/progress", "ChatJobAborted"),
    ],
)
def test_a_job_that_nobody_has_is_not_found_and_no_malformed_body(
    page: Page, path: str, rc: str
) -> None:
    answer = page.try_out("post", path)
    assert (answer.status_code, answer.json["rc"]) == (404, rc)


def test_accounts_and_modes_change_as_offered(page: Page) -> None:
    moderator = make_user(UserRoleTypes.MODERATOR)[1]
    shared = page.try_out("put", "/v2/sharedkeys")
    assert shared.status_code == 200, shared.json
    changes = {
        ("patch", "/v2/sharedkeys/{sharedkey_id}", page.key): shared.json["id"],
        ("put", "/v2/users/{user_id}", moderator): str(page.user_id),
        ("put", "/v2/status/modes", moderator): "",
        ("post", "/v2/operations/ipaddr", moderator): "",
        ("delete", "/v2/operations/ipaddr", moderator): "",
    }
    for (method, path, key), filled in changes.items():
        answer = page.try_out(method, path, key=key, filled=filled)
        assert answer.status_code == 200, (path, answer.json)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("/v2/filters", UserRoleTypes.MODERATOR),
        ("/v2/workers/messages", UserRoleTypes.MODERATOR),
        ("/v2/teams", UserRoleTypes.TRUSTED),
        ("/v2/styles/text", UserRoleTypes.TRUSTED),
    ],
)
def test_what_is_made_as_offered_is_made(page: Page, path: str, role: UserRoleTypes) -> None:
    method = "put" if path == "/v2/filters" else "post"
    answer = page.try_out(method, path, key=make_user(role)[1])
    assert answer.status_code in {200, 201}, (path, answer.json)
