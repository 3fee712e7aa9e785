# SPDX-License-Identifier: AGPL-3.0-or-later
"""Which waiting workers are called when the queue gains something."""

import gc
import random
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from horde.oai.waiting_room import (
    CALL_SECONDS,
    HAND_ONS_A_SECOND,
    Place,
    WaitingRoom,
    build_offer,
)
from horde.text_work import TextWork, parse_text_work


def work(*models: str, count: int = 1, is_chat: bool = False, max_length: int = 80) -> TextWork:
    return TextWork(models, is_chat, count, max_length, 1024)


@dataclass
class Room:
    """A waiting room whose calls are noted, on a clock that a test sets."""

    now: float = 0.0
    called: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = WaitingRoom(self.called.append, lambda: self.now)

    def enter(self, *models: str, **body: Any) -> Place:
        """A worker that has asked once and stands free."""
        offer = build_offer({"models": list(models)} | body)
        assert offer is not None
        place = self.room.enter(offer)
        self.room.end_empty(place, is_work_left=False)
        return place

    def take_called(self) -> list[Place]:
        called, self.called[:] = list(self.called), []
        return called


@pytest.fixture
def room() -> Room:
    return Room()


def test_only_a_worker_of_the_model_is_called(room: Room) -> None:
    room.enter("other")
    chosen = room.enter("wanted")
    room.room.take_work(work("wanted"))
    assert room.take_called() == [chosen]


def test_as_many_are_called_as_there_are_generations(room: Room) -> None:
    places = [room.enter("a") for _ in range(10)]
    room.room.take_work(work("a", count=3))
    assert room.take_called() == places[:3]
    room.room.take_work(work("a"))
    assert room.take_called() == [places[3]]


def test_who_asked_longest_ago_is_called_first(room: Room) -> None:
    first, second = room.enter("a"), room.enter("a")
    room.room.take_work(work("a"))
    room.room.end_empty(first, is_work_left=False)
    room.take_called()
    room.room.take_work(work("a"))
    assert room.take_called() == [second]


def test_a_call_that_brings_nothing_goes_to_the_next_while_something_waits(room: Room) -> None:
    places = [room.enter("a") for _ in range(3)]
    room.room.take_work(work("a"))
    for place in places:
        assert room.take_called() == [place]
        room.room.end_empty(place, is_work_left=True)
    assert room.take_called() == []  # each asked once


def test_a_call_for_what_others_took_ends(room: Room) -> None:
    first, _ = room.enter("a"), room.enter("a")
    room.room.take_work(work("a"))
    assert room.take_called() == [first]
    room.room.end_empty(first, is_work_left=False)
    assert room.take_called() == []


def test_a_worker_that_took_a_job_calls_nobody(room: Room) -> None:
    first, _ = room.enter("a"), room.enter("a")
    room.room.take_work(work("a"))
    assert room.take_called() == [first]
    room.room.end_served(first)
    assert room.take_called() == []


@pytest.mark.parametrize("how", ["leave", "rest"])
def test_the_call_of_a_worker_that_cannot_ask_goes_to_the_next(room: Room, how: str) -> None:
    first, second = room.enter("a"), room.enter("a")
    room.room.take_work(work("a"))
    assert room.take_called() == [first]
    getattr(room.room, how)(first)
    assert room.take_called() == [second]


def test_a_worker_that_was_asking_when_the_work_came_asks_again(room: Room) -> None:
    place = room.enter("a")
    room.room.begin(place)
    room.room.take_work(work("a"))
    assert room.take_called() == []
    room.room.end_empty(place, is_work_left=False)
    assert room.take_called() == [place]


def test_work_before_the_first_question_ends_is_not_missed(room: Room) -> None:
    offer = build_offer({"models": ["a"]})
    assert offer is not None
    place = room.room.enter(offer)
    room.room.take_work(work("a"))
    room.room.end_empty(place, is_work_left=False)
    assert room.take_called() == [place]


def test_old_work_is_forgotten(room: Room) -> None:
    place = room.enter("a")
    room.room.begin(place)
    room.room.take_work(work("a"))
    room.now = CALL_SECONDS
    room.room.end_empty(place, is_work_left=False)
    assert room.take_called() == []


def test_a_worker_that_left_is_not_called(room: Room) -> None:
    room.room.leave(room.enter("a", "b"))
    room.room.take_work(work("a"))
    room.room.take_work(work())
    assert room.take_called() == []
    assert not room.room._shelves


@pytest.mark.parametrize(
    ("body", "wanted", "is_called"),
    [
        ({}, work("a"), True),
        ({}, work(), True),
        ({}, work("b", "a"), True),
        ({}, work("a", is_chat=True), False),
        ({"chat_jobs": True, "model_id": "a"}, work("a", is_chat=True), True),
        ({"chat_jobs": True, "model_id": "c"}, work("a", is_chat=True), False),
        ({"chat_jobs": True, "model_id": "a", "prompt_jobs": False}, work("a"), False),
        ({"chat_jobs": True, "model_id": "a", "prompt_jobs": False}, work(), False),
        ({"max_length": 512}, work("a", max_length=513), False),
        ({"max_length": 512}, work("a", max_length=512), True),
        ({"max_length": "many"}, work("a", max_length=513), True),
        (
            {"chat_jobs": True, "model_id": "a", "chat_limits": {"max_length": 64}},
            work("a", is_chat=True),
            False,
        ),
    ],
)
def test_kind_and_lengths_of_the_offer_decide(
    room: Room, body: dict[str, Any], wanted: TextWork, is_called: bool
) -> None:
    place = room.enter("a", **body)
    room.room.take_work(wanted)
    assert room.take_called() == ([place] if is_called else [])


@pytest.mark.parametrize(
    "body",
    [None, [], "a", 1, {}, {"models": "a"}, {"models": None}, {"models": ["a"], "leaving": True}],
)
def test_a_body_that_offers_nothing_is_not_kept_waiting(body: object) -> None:
    assert build_offer(body) is None


def test_requests_that_nobody_may_take_cost_a_bounded_number_of_questions(room: Room) -> None:
    for _ in range(1000):
        room.enter("a")
    room.room.take_work(work("a"))
    asked = 0
    while called := room.take_called():
        asked += len(called)
        for place in called:
            room.room.end_empty(place, is_work_left=True)
    assert asked == HAND_ONS_A_SECOND + 1


def test_no_work_is_left_while_a_worker_that_has_not_asked_for_it_stands_free(room: Room) -> None:
    """Random workers, work and outcomes: whoever is free has asked since the work came, or the work
    is asked for by as many as it has generations.
    """
    draw = random.Random(7)
    free = [room.enter(*draw.sample("abc", draw.randint(1, 3))) for _ in range(12)]
    asking: list[Place] = []
    for step in range(3000):
        room.now = step * 1.0  # hand-ons are not short
        if draw.random() < 0.4:
            room.room.take_work(work(draw.choice("abc"), count=draw.randint(1, 4)))
        elif asking:
            place = asking.pop(draw.randrange(len(asking)))
            free.append(place)
            room.room.end_empty(place, is_work_left=True)
        for place in room.take_called():
            free.remove(place)
            asking.append(place)
        for call in room.room._calls:
            if call.left and call.ends_at > room.now:
                assert all(
                    place.seen >= call.number for place in free if place.offer.serves(call.work)
                )


WITHOUT_COUNT = '{"models":["a"],"is_chat":true,"count":0,"max_length":1,"max_context_length":1}'


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "{" * 5000, '{"models": "a"}', '{"models": [1]}', WITHOUT_COUNT],
)
def test_what_is_no_hint_is_nothing(text: str) -> None:
    assert parse_text_work(text) is None


def test_one_look_that_found_nothing_counts_for_all_of_the_same_models(room: Room) -> None:
    first, second, other = room.enter("a"), room.enter("a"), room.enter("a", "b")
    room.now = 10.0
    assert room.room.measure_look(second) == 10.0
    room.room.begin(first)
    room.now = 12.0
    assert room.room.measure_look(second) == 12.0  # it may still find something
    room.room.end_empty(first, is_work_left=False)
    assert [room.room.measure_look(place) for place in (first, second)] == [2.0, 2.0]
    assert room.room.measure_look(other) == 12.0


def test_a_look_that_found_work_for_others_counts_for_nobody(room: Room) -> None:
    first, second = room.enter("a"), room.enter("a")
    room.now = 10.0
    room.room.begin(first)
    room.room.end_empty(first, is_work_left=True)
    assert room.room.measure_look(second) == 10.0


def test_looks_are_forgotten_when_hints_were_missed(room: Room) -> None:
    place = room.enter("a")
    room.room.forget_looks()
    assert room.room.measure_look(place) == inf


def test_a_worker_that_could_not_ask_asks_again_whatever_others_found(room: Room) -> None:
    first, second = room.enter("a"), room.enter("a")
    room.room.begin(first)
    room.room.rest(first)
    room.room.begin(second)
    room.room.end_empty(second, is_work_left=False)
    assert room.room.measure_look(first) == inf


def test_looks_are_kept_no_longer_than_their_workers(room: Room) -> None:
    for number in range(100):
        room.room.leave(room.enter(f"model {number}"))
    gc.collect()
    assert not room.room._looks


def test_of_thousands_only_as_many_are_called_as_there_are_jobs(room: Room) -> None:
    places = [room.enter("a") for _ in range(5000)]
    for count in (1, 3, 50):
        room.room.take_work(work("a", count=count))
        called = room.take_called()
        assert (len(called), len(set(called))) == (count, count)
        for place in called:
            room.room.end_served(place)
        assert room.take_called() == []
    assert len(places) == 5000
