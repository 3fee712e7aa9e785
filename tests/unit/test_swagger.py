# SPDX-License-Identifier: AGPL-3.0-or-later
"""The document at /api/swagger.json is a Swagger 2.0 document and tells of each refusal a generate
route has.
"""

from typing import Any

import pytest
from flask import Flask
from flask_restx import Api
from schemathesis.specs.openapi.definitions import SWAGGER_20_VALIDATOR

from horde.app import RESOURCE_MODULES

BODY = {"400", "413", "415", "429", "503"}
STATUSES = {
    "/v2/generate/text/async": {"post": {"200", "202", "401", "403", "404"} | BODY},
    "/v2/generate/chat/async": {"post": {"200", "202", "401", "403", "404"} | BODY},
    "/v2/generate/text/pop": {"post": {"200", "401", "403"} | BODY},
    "/v2/generate/text/submit": {"post": {"200", "401", "403", "404"} | BODY},
    "/v2/generate/text/progress": {"post": {"200", "403", "404", "409"} | BODY},
    "/v2/generate/text/status/{id}": {
        "get": {"200", "404", "429", "503"},
        "delete": {"200", "404", "429", "503"},
    },
    "/v2/generate/text/request/{id}": {"get": {"200", "400", "401", "403", "404", "429", "503"}},
    "/v2/generate/chat/status/{id}": {
        "get": {"200", "404", "429", "503"},
        "delete": {"200", "404", "429", "503"},
    },
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = Flask("horde", static_folder=None)
    api = Api(app, prefix="/api", doc="/api/")
    for module in RESOURCE_MODULES:
        module.register(api)
    answer = app.test_client().get("/api/swagger.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json
    return found


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    SWAGGER_20_VALIDATOR.validate(document)


def test_every_reference_in_the_document_resolves(document: dict[str, Any]) -> None:
    def list_references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [found for child in value.values() for found in list_references(child)]
        return (
            [found for child in value for found in list_references(child)]
            if isinstance(value, list)
            else []
        )

    known = {f"#/definitions/{name}" for name in document["definitions"]}
    assert set(list_references(document)) <= known


def test_every_operation_has_a_name_of_its_own_and_a_summary(document: dict[str, Any]) -> None:
    operations = [
        item[method]
        for item in document["paths"].values()
        for method in item.keys() & {"get", "put", "post", "delete"}
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert [
        operation["operationId"] for operation in operations if not operation.get("summary")
    ] == []


@pytest.mark.parametrize("path", STATUSES)
def test_a_generate_route_tells_every_status_it_answers_with(
    document: dict[str, Any], path: str
) -> None:
    item = document["paths"][path]
    assert {method: set(item[method]["responses"]) for method in STATUSES[path]} == STATUSES[path]
