# SPDX-License-Identifier: AGPL-3.0-or-later
"""Documents and news: the operator's own, defaults for what is missing, and files that cannot be
used.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from horde.database import caches
from tests.integration.api_horde import Api, own_api
from tests.integration.text_horde import refused

NAMES = ("terms", "privacy", "sponsors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses, folder: Path) -> Iterator[Api]:
    settings = {
        "documents_folder": str(folder),
        "title": "Cave & Friends",
        "contact_email": "us@example.org",
    }
    with own_api(service_urls, "documents", **settings) as found:
        yield found


@pytest.fixture(autouse=True)
def _empty_folder(api: Api, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    caches.clear_all()


def read(api: Api, path: str) -> Any:
    answer = api.get(path)
    assert answer.status_code == 200, answer.json
    return answer.json


@pytest.mark.parametrize("name", NAMES)
def test_a_horde_without_documents_of_its_own_has_defaults(api: Api, name: str) -> None:
    markdown = read(api, f"/documents/{name}?format=markdown")
    assert markdown.keys() == {"markdown"}
    assert "Cave & Friends" in markdown["markdown"]
    assert "us@example.org" in markdown["markdown"]
    assert "$" not in markdown["markdown"]
    page = read(api, f"/documents/{name}")
    assert page == read(api, f"/documents/{name}?format=html")
    assert page.keys() == {"html"}
    assert page["html"].startswith("<h1>")
    assert "Cave &amp; Friends" in page["html"]


@pytest.mark.parametrize("name", NAMES)
def test_a_document_of_the_operator_is_sent_in_its_place(api: Api, folder: Path, name: str) -> None:
    text = "# Ours\n\n| a | b |\n| --- | --- |\n| 1 | ü |\n\n<script>alert(1)</script> costs $5"
    (folder / f"{name}.md").write_text(text)
    assert read(api, f"/documents/{name}?format=markdown") == {"markdown": text}
    html = read(api, f"/documents/{name}")["html"]
    assert "<td>ü</td>" in html
    assert "<script>" not in html


@pytest.mark.parametrize("wanted", ["pdf", "HTML", "html,markdown"])
def test_another_format_is_refused(api: Api, wanted: str) -> None:
    for name in NAMES:
        assert refused(api.get(f"/documents/{name}?format={wanted}")) == (400, "BadRequest")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (1024 * 1024 + 1)])
def test_a_document_that_cannot_be_used_is_left_out(api: Api, folder: Path, content: bytes) -> None:
    (folder / "terms.md").write_bytes(content)
    assert "Cave & Friends" in read(api, "/documents/terms?format=markdown")["markdown"]


def test_news_come_newest_first(api: Api, folder: Path) -> None:
    pieces = [
        {"date_published": "2026-01-02", "title": "Second", "newspiece": "b", "extra": 1},
        {
            "date_published": "2026-03-01",
            "title": "Third",
            "newspiece": "c",
            "importance": "Workers",
            "tags": ["x"],
            "more_info_urls": ["https://example.org"],
        },
        {"date_published": "2025-12-31", "title": "First", "newspiece": "a"},
    ]
    (folder / "news.json").write_text(json.dumps(pieces))
    news = read(api, "/status/news")
    assert [piece["title"] for piece in news] == ["Third", "Second", "First"]
    assert news[0] == pieces[1]
    assert news[1] == {
        "date_published": "2026-01-02",
        "title": "Second",
        "newspiece": "b",
        "importance": "Information",
        "tags": [],
        "more_info_urls": [],
    }


def test_a_horde_without_news_has_none(api: Api) -> None:
    assert read(api, "/status/news") == []


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[1]", '[{"title": "x"}]', '[{"date_published": "tomorrow"}]']
)
def test_news_that_cannot_be_read_are_none(api: Api, folder: Path, content: str) -> None:
    (folder / "news.json").write_text(content)
    assert read(api, "/status/news") == []


def test_documents_are_read_anew_after_a_while(api: Api, folder: Path) -> None:
    before = read(api, "/documents/terms?format=markdown")
    (folder / "terms.md").write_text("# New")
    assert read(api, "/documents/terms?format=markdown") == before
    caches.clear_all()  # as five minutes later
    assert read(api, "/documents/terms?format=markdown") == {"markdown": "# New"}
