# SPDX-License-Identifier: AGPL-3.0-or-later
"""Marks on Redis that move with whatever may change what an idle worker is answered.

A mark is a random word, so that a server that lost some of its marks never shows an old one as new.
A mark moves after the commit that it tells of: who read the marks before it looked, and finds them
unmoved, has seen everything. The queue has a mark for each of a fixed number of groups of models,
so that work for others moves none of a worker's, and names that somebody invents fill nothing.
Addresses that are refused have such groups too.
"""

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final
from zlib import crc32

from horde import redis_ctrl
from horde.redis_ctrl import Command, RedisUnavailable
from horde.runtime import Part

EPOCHS_KEY: Final = "horde:pop:epochs"
MODEL_GROUPS: Final = 1024
ADDRESS_GROUPS: Final = 1024

EVERYTHING: Final = "everything"  # switches of the horde, messages to workers
WORKERS: Final = "workers"  # whatever changes who may serve what
ACCOUNTS: Final = "accounts"
ANY_MODEL: Final = "any model"
_LIFE: Final = "life"  # of this content of the server: missing after a loss


@dataclass(slots=True)
class _Debts:
    """Marks of this runtime that could not be moved yet, each with the failure that it is owed for:
    a mark that moved meanwhile moved before the commit of a later failure, and pays none of it.
    """

    failures: dict[str, object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_debts: Part[_Debts] = Part(_Debts)


def build_model_mark(model: str) -> str:
    """The mark of requests for a model."""
    return f"model {crc32(model.encode('utf-8', 'surrogatepass')) % MODEL_GROUPS}"


def build_address_mark(subject: str) -> str:
    """The mark of timeouts of an address, in the form of `ip_subject`."""
    return f"address {crc32(subject.encode('utf-8', 'surrogatepass')) % ADDRESS_GROUPS}"


def list_marks_of_models(models: Sequence[str]) -> list[str]:
    """The marks of a request that lists these models; none is any model."""
    return [build_model_mark(model) for model in models] or [ANY_MODEL]


def move_marks(names: Iterable[str], *, message: tuple[str, str] | None = None) -> bool:
    """Move marks, and publish a message (channel, text) in the same round trip. Best effort: marks
    that cannot be moved now are moved with the next ones; False then.
    """
    debts = _debts.get()
    with debts.lock:
        paying = dict(debts.failures)
    moving = paying.keys() | set(names)
    mapping = {name: secrets.token_hex(8) for name in moving}
    if not mapping and message is None:
        return True

    commands: list[Command] = []
    if mapping:
        commands.append(("HSET", EPOCHS_KEY, *chain.from_iterable(mapping.items())))
    if message is not None:
        commands.append(("PUBLISH", *message))
    try:
        redis_ctrl.ask(redis_ctrl.cache_db, *commands)
    except RedisUnavailable:
        with debts.lock:
            debts.failures |= dict.fromkeys(moving, object())
        return False
    with debts.lock:
        for name, failure in paying.items():
            if debts.failures.get(name) is failure:
                del debts.failures[name]
    return True


def read_marks(names: Sequence[str]) -> tuple[str, ...] | None:
    """The marks of these names; None when they say nothing: Redis is away, was emptied, or marks of
    this process have to be moved first.
    """
    debts = _debts.get()
    if debts.failures and not move_marks(()):
        return None

    try:
        marks = redis_ctrl.ask(redis_ctrl.cache_db, ("HMGET", EPOCHS_KEY, _LIFE, *names))[0]
        if marks[0] is None:
            _begin_life()
            return None
    except RedisUnavailable:
        return None
    return tuple(str(mark) for mark in marks)


def _begin_life() -> None:
    life = secrets.token_hex(8)
    redis_ctrl.ask(redis_ctrl.cache_db, ("HSETNX", EPOCHS_KEY, _LIFE, life))
