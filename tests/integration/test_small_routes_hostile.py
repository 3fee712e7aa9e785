# SPDX-License-Identifier: AGPL-3.0-or-later
"""Teams, messages, styles and collections under odd bodies, queries and paths: refused as JSON,
never a failure, and nothing is written.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde.classes.base.user import UserRoleTypes
from horde.db import transaction
from tests.integration.api_horde import Api, own_api
from tests.integration.rows import forget_everything, make_user

BODIES = {
    "/teams": {"name": "A team", "info": "Some info"},
    "/workers/messages": {
        "message": "hi",
        "worker_id": "00000000-0000-0000-0000-000000000000",
        "worker_ids": ["00000000-0000-0000-0000-000000000000"],
        "worker_type": "text",
        "origin": "me",
        "expiry": 1,
    },
    "/styles/text": {
        "name": "terse",
        "info": "Answers in few words.",
        "prompt": "{p}",
        "params": {"temperature": 1},
        "public": True,
        "nsfw": False,
        "tags": ["a"],
        "models": ["m"],
        "sharedkey": "00000000-0000-0000-0000-000000000000",
        "parameter_policy": {"override": "listed", "overridable": ["top_p"], "ceilings": {"n": 1}},
        "template_fields": [{"name": "a", "description": "b", "required": True}],
    },
    "/collections": {"name": "a set", "info": "Some", "public": True, "styles": ["terse"]},
}
ODD_VALUES: tuple[Any, ...] = (
    0,
    -1,
    10**30,
    1.5,
    True,
    "",
    " ",
    "\u200b",
    "x" * 200_000,
    "字" * 5000,
    [],
    [None],
    [[[]]],
    {},
    {"": ""},
    {"a": {"b": {"c": []}}},
    ["x"] * 5000,
)
PATHS = (
    "/teams/{}",
    "/workers/messages/{}",
    "/styles/text/{}",
    "/styles/text_by_name/{}",
    "/collections/{}",
    "/collection_by_name/{}",
)
ODD_IDS = (
    "x",
    "%F0%9F%99%82",
    "00000000-0000-0000-0000-00000000000g",
    "{00000000-0000-0000-0000-000000000000}",
    "style::collection::style::",
    "a%23999999999999::b",
    "%25",
    "a/b/c",
    "x" * 3000,
    "%D9%A0%23%D9%A1::b",
)
TABLES = ("teams", "worker_messages", "styles", "style_collections")


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "small_routes_hostile") as api:
        forget_everything()
        yield api


@pytest.fixture(scope="module")
def key(api: Api) -> str:
    return make_user(UserRoleTypes.TRUSTED, UserRoleTypes.MODERATOR)[1]


def count_rows() -> list[int]:
    with transaction() as session:
        return [session.scalar(text(f"SELECT count(*) FROM {table}")) or 0 for table in TABLES]


def check(answer: Any, what: str) -> None:
    assert answer.status_code < 500, (what, answer.data[:300])
    assert answer.content_type.startswith("application/json"), what
    assert answer.status_code < 400 or len(answer.data) < 20_000, what


@pytest.mark.parametrize("path", BODIES)
def test_an_odd_value_at_any_place_is_refused_or_harmless(api: Api, key: str, path: str) -> None:
    for name in BODIES[path]:
        for value in ODD_VALUES:
            body = BODIES[path] | {name: value}
            if path == "/workers/messages":
                # One of the three names the workers.
                others = {"worker_id", "worker_ids", "worker_type"} - {name}
                body = {key: each for key, each in body.items() if key not in others}
            answer = api.post(path, body, key)
            check(answer, f"{path} {name} {str(value)[:40]}")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b'"x"', b"null", b"{", b'{"name": "a\\u0000b"}', b'{"\\ud800": 1}']
)
def test_what_is_no_object_is_refused(api: Api, key: str, path: str, body: bytes) -> None:
    before = count_rows()
    answer = api.post(path, body, key)
    check(answer, path)
    assert answer.status_code == 400
    assert count_rows() == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", ODD_IDS)
def test_an_odd_id_is_one_that_nothing_has(api: Api, key: str, path: str, odd: str) -> None:
    answer = api.get(path.format(odd))
    check(answer, path)
    assert answer.status_code == 404
    if "by_name" in path:
        return
    for method in ("PATCH", "DELETE"):
        check(api.call(method, path.format(odd), key, {"name": "A name"}), f"{method} {path}")


@pytest.mark.parametrize("path", ["/styles/text", "/collections", "/workers/messages"])
@pytest.mark.parametrize(
    "query",
    [
        "page=0",
        "page=-1",
        "page=99999999999999999999",
        "page=x",
        "sort=x",
        "type=x",
        "validity=x",
        "user_id=99999999999999999999",
        "worker_id=%F0%9F%99%82",
        "tag=" + "x" * 3000,
        "model=%25",
    ],
)
def test_an_odd_query_is_refused_or_finds_nothing(
    api: Api, key: str, path: str, query: str
) -> None:
    check(api.get(f"{path}?{query}", key), f"{path}?{query}")
