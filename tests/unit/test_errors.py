# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every failure is JSON, inside resources and outside of them. No services: the application is made
of the frame alone.
"""

import logging

import pytest
from flask import Flask
from flask.testing import FlaskClient
from flask_restx import Api, Resource, abort, fields

from horde.apis.errors import register_error_handlers
from horde.apis.responses import register_response_hooks, write_json_with_standard_library
from horde.config import Config
from horde.exceptions import BadRequest, Locked, PayloadInvalid, ServiceUnavailable
from horde.return_codes import ReturnCode

MARKER = "MARKER-7f3a"


class Failing(Resource):
    """Fails in the way its address names."""

    failures = {  # noqa: RUF012
        "refusal": BadRequest("No.", ReturnCode.NO_ELIGIBLE_WORKER, impossible_reason={"a": 1}),
        "remedy": BadRequest("Too few.", ReturnCode.KUDOS_UPFRONT),
        "schema": PayloadInvalid({"params.n": "is too large"}),
        "locked": Locked("In use.", ReturnCode.LOCKED),
        "away": ServiceUnavailable("The database cannot be reached."),
        "bug": ValueError(MARKER),
    }

    def get(self, name: str) -> object:
        if name == "abort":
            abort(400, "No.", errors={"a": "b"})
        if name == "list":
            return [{"name": "é", "count": 1, "inner": {"a": 1, "b": 2}}]
        if name in self.failures:
            raise self.failures[name]
        return {"name": name, "count": None}


@pytest.fixture
def client() -> FlaskClient:
    app = Flask("frame", static_folder=None)
    app.config["RESTX_ERROR_404_HELP"] = False
    app.log_exception = lambda exc_info: None  # type: ignore[method-assign]
    api = Api(app, prefix="/api", doc="/api/")
    api.model("Anything", {"a": fields.String})
    write_json_with_standard_library(api)
    register_error_handlers(app, api)
    register_response_hooks(app, Config(database_url="", secret_key=""))
    api.add_resource(Failing, "/fail/<string:name>")
    app.add_url_rule("/plain", view_func=lambda: 1 / 0)
    return app.test_client()


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        (
            "refusal",
            400,
            {"message": "No.", "rc": "NoEligibleWorker", "impossible_reason": {"a": 1}},
        ),
        (
            "remedy",
            400,
            {
                "message": "Too few. Ask for a shorter reply, or earn kudos by running a worker.",
                "rc": "KudosUpfront",
            },
        ),
        (
            "schema",
            400,
            {
                "message": "Input payload validation failed",
                "errors": {"params.n": "is too large"},
                "rc": "BadRequest",
            },
        ),
        ("locked", 423, {"message": "In use.", "rc": "Locked"}),
        ("away", 503, {"message": "The database cannot be reached."}),
        ("bug", 500, {"message": "Internal Server Error"}),
        ("abort", 400, {"message": "No.", "errors": {"a": "b"}, "rc": "BadRequest"}),
    ],
)
def test_a_failure_of_a_route_is_its_message_and_code(
    client: FlaskClient, name: str, status: int, body: object
) -> None:
    answer = client.get(f"/api/fail/{name}")
    assert (answer.status_code, answer.json) == (status, body)
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


def test_a_failure_outside_of_resources_is_json_too(client: FlaskClient) -> None:
    answer = client.get("/plain")
    assert (answer.status_code, answer.json) == (500, {"message": "Internal Server Error"})


@pytest.mark.parametrize("path", ["/nope", "/api/nope"])
def test_an_unknown_path_is_json_without_hints(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json is not None
    assert set(answer.json) == {"message"}


def test_a_wrong_method_says_which_are_right(client: FlaskClient) -> None:
    answer = client.put("/api/fail/refusal")
    assert answer.status_code == 405
    assert "GET" in answer.headers["Allow"]
    assert answer.json is not None
    assert set(answer.json) == {"message"}


def test_a_bug_is_logged_with_its_place_and_without_its_text(
    client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client.get("/api/fail/bug")
    (record,) = [
        record for record in caplog.records if record.getMessage() == "horde.request.failed"
    ]
    assert record.error_class == "builtins.ValueError"  # type: ignore[attr-defined]
    assert "test_errors.py" in record.stack  # type: ignore[attr-defined]
    assert MARKER not in caplog.text
    assert not any(MARKER in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("path", ["/api/fail/bug", "/api/fail/list", "/nope", "/plain"])
def test_browsers_may_read_every_answer(client: FlaskClient, path: str) -> None:
    headers = client.get(path, headers={"Origin": "https://example.org"}).headers
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert set(headers["Access-Control-Allow-Methods"].split(", ")) == {
        "POST",
        "GET",
        "OPTIONS",
        "PUT",
        "DELETE",
        "PATCH",
    }
    assert {"Content-Type", "apikey", "Client-Agent", "X-Fields"} <= set(
        headers["Access-Control-Allow-Headers"].split(", ")
    )
    assert headers["Horde-Node"].count(":") == 2


@pytest.mark.parametrize(
    ("mask", "body"),
    [
        ("name", [{"name": "é"}]),
        ("name,count", [{"name": "é", "count": 1}]),
        ("{name, inner{b}}", [{"name": "é", "inner": {"b": 2}}]),
        ("*", [{"name": "é", "count": 1, "inner": {"a": 1, "b": 2}}]),
        ("missing", [{}]),
        ("name{deep},count{deep},inner", [{"name": "é", "count": 1, "inner": {"a": 1, "b": 2}}]),
    ],
)
def test_an_answer_is_narrowed_to_the_fields_asked_for(
    client: FlaskClient, mask: str, body: object
) -> None:
    answer = client.get("/api/fail/list", headers={"X-Fields": mask})
    assert (answer.status_code, answer.json) == (200, body)


def test_a_refusal_is_not_narrowed(client: FlaskClient) -> None:
    assert client.get("/api/fail/locked", headers={"X-Fields": "a"}).json == {
        "message": "In use.",
        "rc": "Locked",
    }


@pytest.mark.parametrize("mask", ["{", "}", "a,,b", ",", "a{", "a}", "{a", "{" * 4000])
def test_a_malformed_mask_is_refused(client: FlaskClient, mask: str) -> None:
    answer = client.get("/api/fail/list", headers={"X-Fields": mask})
    assert answer.status_code == 400
    assert answer.json == {"message": "X-Fields is no list of fields.", "rc": "BadRequest"}
