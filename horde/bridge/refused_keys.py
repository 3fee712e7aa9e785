# SPDX-License-Identifier: AGPL-3.0-or-later
"""Keys of a request that a backend does not take.

No list tells which server knows which key, and hosted services refuse what they do not know. So a
refused request is sent again without the keys that are in question, and what turned out to be
unknown is left out from then on.
"""

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature

from horde.bridge.refusals import BackendRefusal
from horde.json_text import JsonObject
from horde.logger import get_logger

_FEATURES = {
    "seed": ChatFeature.SEED,
    "presence_penalty": ChatFeature.PRESENCE_PENALTY,
    "frequency_penalty": ChatFeature.FREQUENCY_PENALTY,
    "reasoning_effort": ChatFeature.REASONING_EFFORT,
}
_OPENAI_KEYS = frozenset({"temperature", "top_p", *_FEATURES})
# Without these a request asks for the same reply, only less exactly.
_OPTIONAL_KEYS = _OPENAI_KEYS | frozenset(
    {
        "top_k", "min_p", "repeat_penalty", "repetition_penalty", "rep_pen", "rep_pen_range",
        "typical_p", "typical", "repeat_last_n", "dynatemp_range", "dynatemp_exponent",
        "stream_options", "parallel_tool_calls", "chat_template_kwargs",
    }
)  # fmt: skip
_NEW_NAMES = {"max_tokens": "max_completion_tokens"}  # of OpenAI's newer models
_REFUSING_STATUSES = frozenset({400, 404, 422, 500, 501})
# A value that is out of range says nothing about other values of its key.
_RANGE = re.compile(
    r"less than|greater than|between|at (?:most|least)|range|m(?:ax|in)imum|must be|[<>]=?|[≤≥]"
    r"|too (?:high|large|low|small|big)|exceed",
    re.IGNORECASE,
)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Blame:
    """Keys that may be why a request was refused.

    ``is_guess`` when the refusal names none; ``is_lasting`` when they are unknown to the backend,
    and not only their values out of range.
    """

    keys: frozenset[str]
    is_guess: bool = False
    is_lasting: bool = False


class RefusedKeys:
    """What one backend refused; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: frozenset[str] = frozenset()

    @property
    def features(self) -> frozenset[ChatFeature]:
        """Features that cannot be declared, since their key is refused."""
        return frozenset(feature for key, feature in _FEATURES.items() if key in self._keys)

    def clear(self) -> None:
        """Forget all: the backend may be another one."""
        self._keys = frozenset()

    def send[Answer](self, body: JsonObject, attempt: Callable[[JsonObject], Answer]) -> Answer:
        """What ``attempt`` answers to the body, without keys that the backend refuses.

        Raises what ``attempt`` raises: a ``BackendRefusal`` once no key can be blamed any more.
        """
        dropped, unknown, guessed = frozenset[str](), frozenset[str](), frozenset[str]()
        while True:
            sent = leave_out(body, self._keys | dropped)
            try:
                answer = attempt(sent)
            except BackendRefusal as refusal:
                blame = blame_keys(refusal, sent)
                if not blame.keys:
                    raise
                dropped |= blame.keys
                if blame.is_guess:
                    guessed = blame.keys if blame.is_lasting else frozenset()
                elif blame.is_lasting:
                    unknown |= blame.keys
            else:
                self._remember(unknown | guessed)
                return answer

    def _remember(self, keys: frozenset[str]) -> None:
        with self._lock:
            new = keys - self._keys
            self._keys |= new
        if new:
            logger.warning("horde.bridge.keys_refused", extra={"keys": ",".join(sorted(new))})


def leave_out(body: JsonObject, keys: Iterable[str]) -> JsonObject:
    """The body without these keys; one that has a newer name gets it instead."""
    left = dict(body)
    for key in keys:
        if key in left:
            value = left.pop(key)
            if key in _NEW_NAMES:
                left[_NEW_NAMES[key]] = value
    return left


def blame_keys(refusal: BackendRefusal, sent: JsonObject) -> Blame:
    """Which keys of a refused request to leave out next; none if that would not help.

    Those that the refusal names; else, should it name no reason of another kind, those that OpenAI
    does not have, and then all.
    """
    is_about_keys = refusal.status in _REFUSING_STATUSES and not refusal.is_context_overflow
    if refusal.is_final or not is_about_keys:
        return Blame(frozenset())
    optional = frozenset(sent) & _OPTIONAL_KEYS
    named = frozenset(key for key in optional if _names(refusal.message, key))
    named |= {
        key for key, new in _NEW_NAMES.items() if key in sent and _names(refusal.message, new)
    }
    if named:
        return Blame(named, is_lasting=_RANGE.search(refusal.message) is None)
    if refusal.status not in (400, 422) or ("response_format" in sent and refusal.names_format):
        return Blame(frozenset())
    if extras := optional - _OPENAI_KEYS:
        return Blame(extras, is_guess=True, is_lasting=True)
    return Blame(optional, is_guess=True)


def _names(message: str, key: str) -> bool:
    """Whether a message names a key, also as camel case has it."""
    pattern = key.replace("_", "_?")
    return re.search(rf"(?<![a-z_]){pattern}(?![a-z_])", message, re.IGNORECASE) is not None
