# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page of what is served tells the truth: each route of it is there or is not, and none is left
out.
"""

import re
from pathlib import Path

from horde.return_codes import ReturnCode
from tests.unit.test_docs import iter_rows, list_app_routes, read_codes, read_section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "coverage.md"


def list_routes(heading: str) -> set[tuple[str, str]]:
    """(method, path) of each row of a section; a parameter has no name."""
    return {
        (method, drop_names(read_codes(row["Path"])[0]))
        for row in iter_rows(read_section(PAGE, heading))
        if "Path" in row
        for method in row["Methods"].split(", ")
    }


def drop_names(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


APP = {(method, drop_names(path)) for method, path in list_app_routes()}


def test_what_the_page_calls_served_is_served_and_the_rest_is_not() -> None:
    served, refused, more = map(list_routes, ("Served", "Not served", "Beside it"))
    assert len(served) + len(refused) == 90  # as many as the AI Horde describes
    assert served - APP == set()
    assert more - APP == set()
    assert refused & APP == set()


def test_every_route_of_the_api_is_on_the_page() -> None:
    routes = {route for route in APP if route[1].startswith("/api/v2/")}
    assert routes == list_routes("Served") | list_routes("Beside it")


def test_the_codes_the_page_leaves_out_are_sent_nowhere() -> None:
    section = read_section(PAGE, "Not served")
    left_out = {
        code for row in iter_rows(section) if "Code" in row for code in read_codes(row["Code"])
    }
    assert len(left_out) == 20
    assert left_out & {str(code) for code in ReturnCode} == set()
