# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages hold together and say what the code does: routes, statuses, keys, defaults, ranges."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from pydantic import BaseModel, TypeAdapter

from horde import exceptions
from horde.apis.document import DocumentedApi
from horde.app import RESOURCE_MODULES
from horde.chat.parameters import ACCEPTED_KEYS
from horde.chat_contract import ChatHordeOptions, ChatRequestRefused
from horde.classes.kobold.chat_request import CHAT_WORKER_FAULT_MESSAGES
from horde.return_codes import ReturnCode
from horde.shapes.jobs import (
    PopAnswer,
    PopBody,
    SubmitAnswer,
    SubmitBody,
    TextPopBody,
    TextSubmitBody,
)
from horde.shapes.requests import (
    ChatRequestBody,
    ChatStatus,
    RequestAccepted,
    RequestQuote,
    TextRequestBody,
    TextStatus,
)
from horde.shapes.text_params import (
    CHAT_PENALTY_RANGES,
    TEXT_PARAM_RANGES,
    TEXT_PARAM_SWITCHES,
    NumberRange,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(DOCS.rglob("*.md"))
LINKED_FILES = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
CODE = sorted((ROOT / "horde").rglob("*.py"))
# A value of `fault_rc` alone.
NEVER_RAISED: dict[ReturnCode, set[int]] = {ReturnCode.CHAT_WORKER_FAULT: set()}
RAISED_BY_VALUE = {  # the default of a class, or handed to a function that raises
    ReturnCode.BAD_REQUEST: 400,
    ReturnCode.FORBIDDEN: 403,
    ReturnCode.REQUEST_TOO_LARGE: 413,
    ReturnCode.KUDOS_UPFRONT: 403,
    ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS: 403,
    ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED: 400,
    ReturnCode.SOURCE_IMAGE_RESOLUTION_EXCEEDED: 400,
    ReturnCode.SOURCE_IMAGE_UNREADABLE: 400,
    ReturnCode.SOURCE_IMAGE_URL_REFUSED: 400,
    ReturnCode.SOURCE_IMAGE_URL_INVALID: 400,
}

type Row = dict[str, str]


def get_name(path: Path) -> str:
    """What a parametrised test is called."""
    return str(path.relative_to(ROOT))


def read_codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def read_section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def iter_rows(text: str) -> Iterator[Row]:
    """Every table row of a text, by the headers of its table."""
    headers: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headers = []
            continue
        cells = [cell.strip() for cell in line.strip()[1:-1].split(" |")]
        if not headers:
            headers = cells
        elif not set(line) <= set("|- "):
            yield dict(zip(headers, cells, strict=False))


def read_rows_by_code(page: str, heading: str) -> dict[str, Row]:
    """The rows of a section by each name in the backticks of their first cell."""
    rows = iter_rows(read_section(REFERENCE / page, heading))
    return {code: row for row in rows for code in read_codes(next(iter(row.values())))}


def list_slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=get_name)
def test_a_page_opens_with_title_summary_and_topics(page: Path) -> None:
    title, summary, topics = page.read_text().split("\n\n")[:3]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[A-Z]", summary)
    assert re.search(r"(^|\. )Topics: .+", summary) or re.fullmatch(r"Topics: .+", topics)


@pytest.mark.parametrize("page", LINKED_FILES, ids=get_name)
def test_every_relative_link_resolves(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page if not path else (page.parent / path)
        if not linked.exists() or (anchor and anchor not in list_slugs(linked)):
            broken.append(target)
    assert broken == []


def test_the_index_links_every_page_but_the_numbered_records() -> None:
    linked = {
        (DOCS / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)]+)\)", (DOCS / "README.md").read_text())
    }
    expected = {
        page for page in PAGES if page.parent.name != "decisions" and page != DOCS / "README.md"
    }
    assert sorted(map(get_name, expected - linked)) == []


def test_every_page_and_section_that_the_code_names_exists() -> None:
    missing = []
    for path in CODE:
        for page, sections in re.findall(
            r'(docs/[\w./-]+\.md)((?:,? (?:and )?"[^"]+")*)', path.read_text()
        ):
            target = ROOT / page
            titles = (
                re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                if target.exists()
                else []
            )
            wanted = [" ".join(t.split()) for t in re.findall(r'"([^"]+)"', sections)]
            missing += [
                (get_name(path), page, section) for section in wanted if section not in titles
            ]
            missing += [] if target.exists() else [(get_name(path), page, "")]
    assert missing == []


def list_app_routes() -> set[tuple[str, str]]:
    """(method, path) of every route, in the form of the page."""
    app = Flask("horde", static_folder=None)
    api = DocumentedApi(app, prefix="/api", doc="/api/")
    for module in RESOURCE_MODULES:
        module.register(api)
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }


def test_what_the_bridge_warns_of_is_explained() -> None:
    page = (DOCS / "how-to" / "serve-jobs-with-the-bridge.md").read_text()
    code = "".join(path.read_text() for path in CODE if path.parent.name == "bridge")
    events = set(re.findall(r'logger\.(?:warning|error)\(\s*"horde\.bridge\.(\w+)"', code))
    assert len(events) > 10
    assert {
        event for event in events if not re.search(rf"`(horde\.bridge\.)?{event}`", page)
    } == set()


def test_every_route_is_documented_and_no_other() -> None:
    rows = [row for row in iter_rows((REFERENCE / "routes.md").read_text()) if "Path" in row]
    documented = [
        (method, read_codes(row["Path"])[0]) for row in rows for method in row["Method"].split(", ")
    ]
    assert len(documented) == len(set(documented))
    assert set(documented) == list_app_routes()


def list_raised_statuses() -> dict[ReturnCode, set[int]]:
    """The statuses each code is raised under: a refusal's class has one, and the code stands in its
    call.
    """
    classes = {
        name: kind
        for name, kind in vars(exceptions).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    classes |= {"ChatRequestRefused": ChatRequestRefused}
    statuses: dict[ReturnCode, set[int]] = defaultdict(set)
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            kind = (
                classes.get(node.func.id)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                else None
            )
            if kind is None:
                continue
            for argument in ast.walk(node):
                if (
                    isinstance(argument, ast.Attribute)
                    and getattr(argument.value, "id", "") == "ReturnCode"
                ):
                    statuses[ReturnCode[argument.attr]].add(kind.status)
    return statuses


def test_every_return_code_has_the_status_it_is_raised_with() -> None:
    documented = {
        ReturnCode(code): {int(status) for status in re.findall(r"\d+", row["Status"])}
        for code, row in read_rows_by_code("errors.md", "Codes").items()
    }
    assert documented == {
        **{code: {status} for code, status in RAISED_BY_VALUE.items()},
        **list_raised_statuses(),
        **NEVER_RAISED,
    }


def list_keys(shape: type, name: str) -> dict[str, dict[str, Any]]:
    """The keys of a shape and of those inside it, by name, as JSON Schema describes them."""
    schema = TypeAdapter(shape).json_schema()
    found = {name: schema, **schema.get("$defs", {})}
    return {inner: part["properties"] for inner, part in found.items() if part.get("properties")}


TEXT_SHAPES = (
    TextRequestBody,
    RequestAccepted,
    RequestQuote,
    TextStatus,
    PopBody,
    PopAnswer,
    SubmitBody,
    SubmitAnswer,
)
CHAT_SHAPES = (ChatRequestBody, ChatStatus, PopBody, SubmitBody)


@pytest.mark.parametrize("shape", [*TEXT_SHAPES, *CHAT_SHAPES])
def test_every_key_of_a_shape_is_documented(shape: type) -> None:
    pages = (
        ["chat_requests.md", "text_requests.md"] if shape in CHAT_SHAPES else ["text_requests.md"]
    )
    documented = {code for page in pages for code in read_codes((REFERENCE / page).read_text())}
    missing = [
        (name, key)
        for name, keys in list_keys(shape, shape.__name__).items()
        for key in keys
        if key not in documented
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("model", "page", "heading"),
    [
        (ChatHordeOptions, "chat_requests.md", "The horde object"),
        (TextRequestBody, "text_requests.md", "Request body"),
        (TextPopBody, "text_requests.md", "Pop"),
        (TextSubmitBody, "text_requests.md", "Submit"),
    ],
)
def test_every_key_of_a_body_is_documented_with_its_default(
    model: type[BaseModel], page: str, heading: str
) -> None:
    rows = read_rows_by_code(page, heading)
    documented = {
        name: (rows[name]["Default"] if name in rows else "missing") for name in model.model_fields
    }
    optional = {
        name: default for name, default in documented.items() if not default.startswith("required")
    }
    assert optional == {name: describe_default(model, name) for name in optional}
    must = {name for name, field in model.model_fields.items() if field.is_required()}
    assert must <= documented.keys() - optional.keys()


def describe_default(model: type[BaseModel], name: str) -> str:
    """A default as the pages write it."""
    default = model.model_fields[name].get_default(call_default_factory=True)
    if default is None or (default == [] and name == "gen_metadata"):
        return "none"
    value = default.value if isinstance(default, Enum) else default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_every_option_of_the_horde_object_is_one() -> None:
    assert set(read_rows_by_code("chat_requests.md", "The horde object")) == set(
        ChatHordeOptions.model_fields
    )


def test_every_key_of_a_chat_request_is_documented_and_no_other() -> None:
    section = read_section(REFERENCE / "chat_requests.md", "Request body")
    assert {code for row in iter_rows(section) for code in read_codes(row["Key"])} == ACCEPTED_KEYS


def test_the_document_of_the_routes_has_the_keys_that_are_read() -> None:
    chat = list_keys(ChatRequestBody, "ChatRequestBody")
    assert set(chat["ChatRequestBody"]) == ACCEPTED_KEYS
    assert set(chat["ChatHordeOptions"]) == set(ChatHordeOptions.model_fields)
    params = list_keys(TextRequestBody, "TextRequestBody")["TextRequestBody"]["params"]
    assert set(params["properties"]) == {
        *TEXT_PARAM_RANGES,
        *TEXT_PARAM_SWITCHES,
        "sampler_order",
        "stop_sequence",
    }


def describe_range(bounds: NumberRange) -> str:
    """A range as the pages write it."""
    return f"{bounds.minimum:g} to {bounds.maximum:.10g}"


def test_every_param_is_documented_with_its_range() -> None:
    rows = read_rows_by_code("text_requests.md", "Params")
    numbers = {name: row for name, row in rows.items() if row["Range"]}
    assert {name: (row["Type"], row["Range"]) for name, row in numbers.items()} == {
        name: ("integer" if bounds.is_integer else "number", describe_range(bounds))
        for name, bounds in TEXT_PARAM_RANGES.items()
    }
    assert {name for name, row in rows.items() if row["Type"] == "boolean"} == TEXT_PARAM_SWITCHES
    assert rows.keys() - numbers.keys() - TEXT_PARAM_SWITCHES == {"sampler_order", "stop_sequence"}


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("max_tokens", TEXT_PARAM_RANGES["max_length"]),
        ("temperature", TEXT_PARAM_RANGES["temperature"]),
        ("top_p", TEXT_PARAM_RANGES["top_p"]),
        *CHAT_PENALTY_RANGES.items(),
    ],
)
def test_a_range_of_a_chat_key_is_documented(key: str, bounds: NumberRange) -> None:
    assert (
        describe_range(bounds)
        in read_rows_by_code("chat_requests.md", "Request body")[key]["Meaning"]
    )


def test_every_fault_reason_is_documented_and_no_other() -> None:
    section = read_section(REFERENCE / "chat_requests.md", "Structured submit")
    documented = [
        code
        for row in iter_rows(section)
        if "`fault_reason`" in row
        for code in read_codes(row["`fault_reason`"])
    ]
    assert sorted(documented) == sorted(CHAT_WORKER_FAULT_MESSAGES)
