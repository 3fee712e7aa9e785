# SPDX-License-Identifier: AGPL-3.0-or-later
"""A test that expects a 404 of a path which no route has would pass for ever."""

import re
from pathlib import Path

import pytest
from flask import Flask
from flask_restx import Api

from horde.app import RESOURCE_MODULES

TESTS = Path(__file__).parents[1]
ASKED = re.compile(r"""["'](?:/api)?(?:/v2)?/?(generate/(?:text|chat)/[a-z/]*)""")


def list_asked_paths() -> list[tuple[str, str]]:
    """(file, start of a path) of every path of the generate routes that a test spells."""
    return sorted(
        {
            (path.relative_to(TESTS).as_posix(), asked)
            for path in TESTS.rglob("*.py")
            for asked in ASKED.findall(path.read_text(encoding="utf-8"))
        }
    )


@pytest.fixture(scope="module")
def routes() -> list[str]:
    """The generate routes up to their first variable."""
    app = Flask("horde", static_folder=None)
    api = Api(app, prefix="/api", doc="/api/")
    for module in RESOURCE_MODULES:
        module.register(api)
    paths = [rule.rule.removeprefix("/api/v2/") for rule in app.url_map.iter_rules()]
    return [path.partition("<")[0] for path in paths if path.startswith("generate/")]


def test_every_path_that_a_test_asks_for_has_a_route(routes: list[str]) -> None:
    asked = list_asked_paths()
    assert ("integration/test_chat_submit_request.py", "generate/text/request/") in asked
    missing = [
        (name, path)
        for name, path in asked
        if not any(path.startswith(route) or route.startswith(path) for route in routes)
    ]
    assert missing == []
