# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers that wait for a job, and whose turn it is to ask when the queue gains something.

Only the API knows what a worker may take, so one that is called asks, and may come back with
nothing. As many are called at once as there are generations to take, the one first that asked
longest ago, and whoever comes back with nothing hands its call on to the next. Nothing here waits
or does I/O. Source: docs/reference/chat_front.md, "Waiting pops".
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final
from weakref import WeakValueDictionary

from horde.text_work import TextWork

# A call that has not ended by then is forgotten: every worker asks again by a timer as well.
CALL_SECONDS: Final = 10.0
MAX_OPEN_CALLS: Final = 1000
# Of calls that came back with nothing though something waits, in one process. So requests that no
# worker may take cost no more than polling did; what is left out the timers find.
HAND_ONS_A_SECOND: Final = 100

type _Shelf = tuple[bool, str | None]
"""Whether chat, and the model; None for text of any model."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The most a worker takes, in tokens; None where its pop says nothing that can be compared."""

    max_length: int | None
    max_context_length: int | None

    def allow(self, work: TextWork) -> bool:
        """Whether the work is short enough."""
        return (self.max_length is None or work.max_length <= self.max_length) and (
            self.max_context_length is None or work.max_context_length <= self.max_context_length
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """What a pop says it serves: models of text jobs, none when it takes none, and the chat
    model.
    """

    text_models: frozenset[str]
    text_lengths: Lengths
    chat_model: str | None
    chat_lengths: Lengths

    def list_shelves(self) -> Iterator[_Shelf]:
        """Under what the worker is looked for."""
        for model in self.text_models:
            yield False, model
        if self.text_models:
            yield False, None
        if self.chat_model is not None:
            yield True, self.chat_model

    def serves(self, work: TextWork) -> bool:
        """Whether the worker may be able to take the work."""
        if work.is_chat:
            return self.chat_model in work.models and self.chat_lengths.allow(work)
        is_named = not work.models or not self.text_models.isdisjoint(work.models)
        return bool(self.text_models) and is_named and self.text_lengths.allow(work)


def build_offer(body: object) -> Offer | None:
    """The offer of a decoded pop; None for one that wants no job, or that the API would not
    take.
    """
    if not isinstance(body, dict) or not isinstance(body.get("models"), list):
        return None
    if body.get("leaving"):
        return None
    models = frozenset(model for model in body["models"] if isinstance(model, str))
    is_chat = body.get("chat_jobs") is True
    takes_text = body.get("prompt_jobs") is not False or not is_chat
    chat_model = body.get("model_id") if is_chat else None
    limits = body.get("chat_limits")
    return Offer(
        text_models=models if takes_text else frozenset(),
        text_lengths=_build_lengths(body),
        chat_model=chat_model if isinstance(chat_model, str) else None,
        chat_lengths=_build_lengths(limits if isinstance(limits, dict) else {}),
    )


def _build_lengths(values: Mapping[str, object]) -> Lengths:
    """The API has defaults of its own for what is missing, and forms of numbers it takes."""
    length, context = values.get("max_length"), values.get("max_context_length")
    return Lengths(
        length if isinstance(length, int) else None, context if isinstance(context, int) else None
    )


@dataclass(slots=True, eq=False)
class Call:
    """Work that workers are called for. `left` of it nobody is asking for."""

    work: TextWork
    number: int
    left: int
    ends_at: float

    def list_shelves(self) -> Iterable[_Shelf]:
        """Where workers that serve it stand."""
        if not self.work.models:
            return ((self.work.is_chat, None),)
        return ((self.work.is_chat, model) for model in self.work.models)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Look:
    """When a worker of some models last heard that nothing waits for them. All waiting workers of
    just these models share it.
    """

    began_at: float = -inf


@dataclass(slots=True, eq=False)
class Place:
    """One waiting worker. It either stands free, or asks, or rests until it is made free again."""

    offer: Offer
    look: Look
    asked_at: float
    is_free: bool = False
    call: Call | None = None  # for which it asks
    # Number of the last work that it cannot have missed when it last asked.
    seen: int = 0
    turn: int = 0  # the lower, the longer ago it asked


@dataclass(slots=True, eq=False)
class WaitingRoom:
    """The places of one process; `summon` is told of each worker that is to ask now."""

    summon: Callable[[Place], None]
    clock: Callable[[], float]
    _shelves: dict[_Shelf, dict[Place, None]] = field(default_factory=dict)  # in order of turns
    _calls: deque[Call] = field(default_factory=lambda: deque(maxlen=MAX_OPEN_CALLS))
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _turns: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _latest: int = 0
    _hand_ons: int = 0
    _hand_ons_until: float = 0.0
    _looks: "WeakValueDictionary[object, Look]" = field(default_factory=WeakValueDictionary)

    def enter(self, offer: Offer) -> Place:
        """A place for a worker that asks right away: it misses nothing from now on."""
        key = offer.text_models, offer.chat_model
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = Look()
        return Place(offer, look, asked_at=self.clock(), seen=self._latest)

    def take_work(self, work: TextWork) -> None:
        """Call workers for what the queue gained."""
        self._latest = next(self._numbers)
        call = Call(work, self._latest, work.count, self.clock() + CALL_SECONDS)
        self._calls.append(call)
        self._call_workers(call)

    def begin(self, place: Place) -> None:
        """The worker asks now, called or by itself."""
        self._take_off(place)
        place.seen, place.asked_at, place.is_free = self._latest, self.clock(), False

    def measure_look(self, place: Place) -> float:
        """Seconds since a worker of the same models began to ask that then heard that nothing waits
        for them; infinite for a place that does not stand free.
        """
        return self.clock() - place.look.began_at if place.is_free else inf

    def forget_looks(self) -> None:
        """What was found so far says nothing any more."""
        for look in self._looks.values():
            look.began_at = -inf

    def end_empty(self, place: Place, *, is_work_left: bool) -> None:
        """It came back with nothing, and stands free. Without `is_work_left` nothing waits for its
        models, so others need not ask for what it was called for.
        """
        if not is_work_left:
            place.look.began_at = place.asked_at
            if place.call is not None:
                place.call.left, place.call = 0, None
        place.turn, place.is_free = next(self._turns), True
        for shelf in place.offer.list_shelves():
            self._shelves.setdefault(shelf, {})[place] = None
        self._hand_on(place)
        missed = self._find_missed(place)
        if missed is not None:
            self._send(place, missed)

    def end_served(self, place: Place) -> None:
        """It has a job, or is refused for good: its call, if it had one, is over."""
        place.call = None

    def rest(self, place: Place) -> None:
        """It could not ask; somebody else does. `end_empty` brings it back."""
        self._hand_on(place)

    def leave(self, place: Place) -> None:
        """It waits no more."""
        self._take_off(place)
        self._hand_on(place)

    def _take_off(self, place: Place) -> None:
        for shelf in place.offer.list_shelves():
            standing = self._shelves.get(shelf)
            if standing is not None:
                standing.pop(place, None)
                if not standing:
                    del self._shelves[shelf]

    def _hand_on(self, place: Place) -> None:
        call, place.call = place.call, None
        if call is not None and self._may_hand_on():
            call.left += 1
            self._call_workers(call)

    def _may_hand_on(self) -> bool:
        now = self.clock()
        if now >= self._hand_ons_until:
            self._hand_ons, self._hand_ons_until = 0, now + 1.0
        self._hand_ons += 1
        return self._hand_ons <= HAND_ONS_A_SECOND

    def _call_workers(self, call: Call) -> None:
        while call.left > 0 and (place := self._find_place(call)) is not None:
            self._send(place, call)

    def _send(self, place: Place, call: Call) -> None:
        call.left -= 1
        self.begin(place)
        place.call = call
        self.summon(place)

    def _find_place(self, call: Call) -> Place | None:
        """The worker whose turn it is, of those that have not asked since the work came."""
        firsts = (
            next(
                (
                    place
                    for place in self._shelves.get(shelf, ())
                    if place.seen < call.number and place.offer.serves(call.work)
                ),
                None,
            )
            for shelf in call.list_shelves()
        )
        return min((place for place in firsts if place), key=lambda place: place.turn, default=None)

    def _find_missed(self, place: Place) -> Call | None:
        """Work that came while the worker was asking, and that nobody asks for."""
        now = self.clock()
        while self._calls and self._calls[0].ends_at <= now:
            self._calls.popleft()
        for call in reversed(self._calls):
            if call.number <= place.seen:
                return None
            if call.left > 0 and place.offer.serves(call.work):
                return call
        return None
