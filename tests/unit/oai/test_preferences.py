# SPDX-License-Identifier: AGPL-3.0-or-later
"""How long a client would wait, from any form of `Prefer`."""

import time

import pytest

from horde.oai.preferences import parse_wait_seconds

CEILING_SECONDS = 30


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["wait=10"], 10),
        (["Wait = 10"], 10),
        (['wait="10"'], 10),
        (["wait=0030"], 30),
        (["respond-async, wait=10"], 10),
        (["wait=10;reason=idle, return=minimal"], 10),
        (['note="a, wait=3", wait=5'], 5),
        ([",, wait=5"], 5),
        (["wait=5,"], 5),
        (["return=minimal", "wait=6"], 6),
    ],
)
def test_a_wait_is_found_in_every_form_the_rfc_knows(lines: list[str], seconds: int) -> None:
    assert parse_wait_seconds(lines, CEILING_SECONDS) == seconds


@pytest.mark.parametrize("number", ["31", "3600", "9" * 5000, "0" * 5000 + "99"])
def test_a_longer_wait_is_cut_to_the_ceiling(number: str) -> None:
    assert parse_wait_seconds([f"wait={number}"], CEILING_SECONDS) == CEILING_SECONDS


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["wait"],
        ["wait="],
        ["wait=0"],
        ["wait=-5"],
        ["wait=1.5"],
        ["wait=1e3"],
        ["wait=ten"],
        ["wait=٣"],
        ["wait=10 seconds"],
        ["waiting=5"],
        ["respond-async"],
        ['wait="5'],
        ['wait="\\5"'],
    ],
)
def test_what_is_no_wait_is_ignored(lines: list[str]) -> None:
    assert parse_wait_seconds(lines, CEILING_SECONDS) is None


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [(["wait=3, wait=20"], 3), (["wait=3", "wait=20"], 3), (["wait=no, wait=20"], None)],
)
def test_of_several_waits_the_first_counts(lines: list[str], seconds: int | None) -> None:
    assert parse_wait_seconds(lines, CEILING_SECONDS) == seconds


@pytest.mark.parametrize("piece", ["a", ";", ",", '"', 'a="', 'a;"\\"', "a=b,", "\\"])
def test_a_hostile_header_is_read_in_no_time(piece: str) -> None:
    started = time.process_time()
    assert parse_wait_seconds([piece * 20_000], CEILING_SECONDS) is None
    assert time.process_time() - started < 1.0
