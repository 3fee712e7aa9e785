# SPDX-License-Identifier: AGPL-3.0-or-later
"""Small rules of workers and figures."""

from uuid import UUID

import pytest

from horde.database.stats import compute_eta
from horde.database.workers import (
    MODERATOR,
    OWNER,
    PUBLIC,
    WorkerRecord,
    describe_performance,
    narrow_details,
    parse_id,
)
from horde.shown_text import clean_shown_text, is_profane

ID = "0b7f1f6e-4a4f-4c58-8f6c-1f0f7f1d2c3b"


@pytest.mark.parametrize("text", [ID, ID.upper()])
def test_an_id_is_read(text: str) -> None:
    assert parse_id(text) == UUID(ID)


@pytest.mark.parametrize(
    "text", ["", "x", ID.replace("-", ""), f"{{{ID}}}", f"urn:uuid:{ID}", f" {ID}", ID[:-1]]
)
def test_anything_else_is_no_id(text: str) -> None:
    assert parse_id(text) is None


@pytest.mark.parametrize("text", ["fuck", "The FUCKER", "big-sh1t", "a_c*nt cunt", "@sshole 5000"])
def test_profanity_is_found_as_a_word(text: str) -> None:
    assert is_profane(text)


@pytest.mark.parametrize(
    "text", ["", "Scunthorpe 7B", "shiitake", "Dick van Dyke", "class-A4000", "cockatiel"]
)
def test_names_that_only_look_odd_pass(text: str) -> None:
    assert not is_profane(text)


@pytest.mark.parametrize(
    ("queued", "threads", "speed", "eta"),
    [
        (0, 0, 0.0, 0),
        (0, 2, 5.0, 0),
        (100, 2, 5.0, 10),
        (99, 2, 5.0, 9),
        (100, 0, 5.0, 10_000),
        (100, 2, 0.0, 10_000),
    ],
)
def test_eta_is_what_waits_over_throughput(
    queued: int, threads: int, speed: float, eta: int
) -> None:
    assert compute_eta(queued_tokens=queued, thread_count=threads, tokens_per_second=speed) == eta


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (1.0, "No requests fulfilled yet"),
        (0.99, "1.0 tokens per second"),
        (14.24, "14.2 tokens per second"),
        (3, "3 tokens per second"),
    ],
)
def test_speed_in_words(speed: float, words: str) -> None:
    assert describe_performance(speed) == words


@pytest.mark.parametrize(
    ("privilege", "is_public", "keys"),
    [
        (PUBLIC, False, {"name"}),
        (PUBLIC, True, {"name", "owner", "messages"}),
        (OWNER, False, {"name", "owner", "messages"}),
        (
            MODERATOR,
            False,
            {"name", "owner", "messages", "paused", "suspicious", "ipaddr", "contact"},
        ),
    ],
)
def test_details_are_narrowed(privilege: int, is_public: bool, keys: set[str]) -> None:
    every = {"name", "owner", "messages", "paused", "suspicious", "ipaddr", "contact"}
    record = WorkerRecord(owner_id=1, is_public=is_public, details=dict.fromkeys(every, 1))
    assert narrow_details(record, privilege).keys() == keys


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain name", "a plain name"),
        ("two  spaces", "two  spaces"),  # as names of existing workers may have them
        ("<b>bold</b> name", "bold name"),
        ("<scr<b>ipt>alert(1)", "scriptalert(1)"),
        ("<<b>img src=x onerror=1>", "img src=x onerror=1"),
        ("a < b > c", "a  c"),
        ("half <open", "half open"),
        ("line\nbreak\ttab\u2028separator", "line break tab separator"),
        ("bell\x07 and \x1b[2Jescape\x7f", "bell and [2Jescape"),
        ("\u202egnp.exe\u202c", "gnp.exe"),
        ("\u200b\u2060\ufeff", ""),
        ("\U0001f4a9 e\u0301 名前", "\U0001f4a9 e\u0301 名前"),
        ("<" * 50_000, ""),
        ("<a" * 50_000, "a" * 2048),
    ],
)
def test_text_shown_to_others_has_neither_markup_nor_anything_invisible(
    text: str, shown: str
) -> None:
    assert clean_shown_text(text) == shown
