# SPDX-License-Identifier: AGPL-3.0-or-later
"""Idle answers of a process, kept for workers that ask the same again while nothing has changed.

Inside a worker's check-in window a pop is answered from here, without a statement, as long as every
mark that could change the answer stands where it stood before the worker last looked. Source:
docs/decisions/0032-idle-pops-are-answered-by-marks.md.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from horde import model_reference, pop_epochs, r2
from horde.database.users import Caller, get_account_generation
from horde.ip_subject import build_ip_subject
from horde.runtime import Part

MAX_KEPT = 4000  # bounds the memory, at some 2 KiB each; the one answered longest ago goes first


@dataclass(frozen=True, slots=True)
class Look:
    """A pop that begins to look: under what its answer is kept, and where the marks stand. No marks
    are none to go by.
    """

    key: bytes
    marks: tuple[object, ...] | None


@dataclass(frozen=True, slots=True)
class KnownIdle:
    """An idle answer, until when it may be given, and what is still judged at every pop."""

    marks: tuple[object, ...]
    ends_at: datetime
    answer: Any
    caller: Caller
    is_speed_limited: bool


@dataclass(slots=True)
class _Kept:
    """What one runtime keeps."""

    answers: OrderedDict[bytes, KnownIdle] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_kept: Part[_Kept] = Part(_Kept)


def begin_look(api_key: str, address: str, body: Mapping[str, object], models: list[str]) -> Look:
    """Read the marks, before anything else of the pop is read. `models` are those it offers for
    text; that of chat jobs stands in the body.
    """
    text = json.dumps([api_key, address, body], sort_keys=True, default=repr)
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    chat_model = body.get("model_id")
    named = {*models, chat_model} if isinstance(chat_model, str) else set(models)
    names = [
        *(pop_epochs.EVERYTHING, pop_epochs.ACCOUNTS, pop_epochs.WORKERS),
        pop_epochs.ANY_MODEL,
        pop_epochs.build_address_mark(build_ip_subject(address)),
    ]
    names += sorted({pop_epochs.build_model_mark(model) for model in named})
    # Before the marks: what this process hears of an account afterwards moves it.
    own = (get_account_generation(), model_reference.get_version(), r2.is_circuit_open())
    marks = pop_epochs.read_marks(names)
    return Look(key, None if marks is None else (*own, *marks))


def find_idle(look: Look, now: datetime) -> KnownIdle | None:
    """The idle answer that still holds, None when the worker has to look."""
    kept = _kept.get()
    with kept.lock:
        known = kept.answers.get(look.key)
        if known is None:
            return None
        if look.marks != known.marks or now >= known.ends_at:
            del kept.answers[look.key]
            return None
        kept.answers.move_to_end(look.key)
        return known


def keep_idle(look: Look, known: KnownIdle) -> None:
    """Keep an idle answer under the marks of its own look."""
    kept = _kept.get()
    with kept.lock:
        kept.answers[look.key] = known
        while len(kept.answers) > MAX_KEPT:
            kept.answers.popitem(last=False)
