# SPDX-License-Identifier: AGPL-3.0-or-later
"""Settings as text, turned into typed values within bounds. Nothing here knows a single setting.

A dataclass declares each setting as a field: its type, its bounds and, with ``named``, its
variables. ``read_settings`` makes the dataclass from a mapping of text. A value out of bounds is
refused by one sentence that names the variable and never shows the value, which may be a secret.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, cast, get_args, get_type_hints
from urllib.parse import quote, unquote_to_bytes, urlsplit

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

type Network = IPv4Network | IPv6Network

MAX_TEXT_CHARACTERS = 1000

READING = ConfigDict(extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
"""How pydantic reads a dataclass of settings; each one has it as ``__pydantic_config__``."""

_LABEL = r"[0-9A-Za-z_][0-9A-Za-z_-]{0,62}"
_PLACE = re.compile(
    rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)|\[(?P<ipv6>[^]]+)\])(?::(?P<port>[0-9]{{1,5}}))?"
)
MAX_HOST_CHARACTERS = 253
MAX_PORT = 65_535


class ConfigError(Exception):
    """A setting is missing or cannot be used; the message is a sentence that names it.

    ``name`` is the variable, for callers that know it by another name.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


@dataclass(frozen=True, slots=True)
class Read:
    """How the text of a setting is read; ``parse`` raises ValueError for what cannot be used.

    ``words`` say what can, and complete "NAME has to be ...".
    """

    parse: Callable[[str], Any]
    words: str

    def __get_pydantic_core_schema__(self, _: object, __: object) -> core_schema.CoreSchema:
        """Let pydantic call ``parse`` and nothing else."""
        return core_schema.no_info_plain_validator_function(self.parse)


def named(*names: str) -> Any:
    """The variables of a setting; of several that are set, the first counts."""
    return Field(validation_alias=AliasChoices(*names))


def within(least: float, most: float) -> Any:
    """The bounds of a number, both included."""
    return Field(ge=least, le=most)


def one_of(**values: Any) -> Read:
    """A setting of few words in any case, each with its value."""

    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise ValueError
        return values[text.lower()]

    return Read(parse, " or ".join(values))


def matching(is_allowed: Callable[[str], object], words: str) -> Read:
    """A text of at most a thousand characters that passes a test, as it stands."""

    def check(text: str) -> str:
        if len(text) > MAX_TEXT_CHARACTERS or not is_allowed(text):
            raise ValueError
        return text

    return Read(check, words)


def read_settings[S](kind: type[S], values: Mapping[str, str]) -> S:
    """The settings of a dataclass from text by variable. Blanks and line breaks around a value are
    dropped, and an empty value counts as unset. Raises ConfigError.
    """
    names = list_setting_names(kind)
    given = {name: values[name].strip() for name in names if values.get(name, "").strip()}
    try:
        settings: S = _build_reader(cast(Hashable, kind)).validate_python(given)
    except ValidationError as error:
        place = str(error.errors(include_context=False, include_url=False)[0]["loc"][0])
        if place not in given:
            raise ConfigError(place, "is not set.") from None
        words = next(
            words for names, words in describe_settings(cast(Hashable, kind)) if place in names
        )
        raise ConfigError(place, f"has to be {words}.") from None
    return settings


@cache
def _build_reader(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def list_setting_names(kind: type) -> list[str]:
    """Every variable that ``read_settings`` looks at, in the order of the fields."""
    return [name for names, _ in describe_settings(cast(Hashable, kind)) for name in names]


@cache
def describe_settings(kind: Hashable) -> tuple[tuple[tuple[str, ...], str], ...]:
    """For each setting its variables, and what it may be, in words."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_describe(*get_args(hint)) for hint in hints.values() if _has_names(hint))


def _has_names(hint: object) -> bool:
    return any(isinstance(fact, FieldInfo) and fact.validation_alias for fact in get_args(hint))


def _describe(kind: object, *facts: object) -> tuple[tuple[str, ...], str]:
    names: list[str] = []
    words, bounds = "", {}
    for fact in facts:
        match fact:
            case Read():
                words = fact.words
            case FieldInfo(validation_alias=AliasChoices(choices=choices)):
                names = [str(name) for name in choices]
            case FieldInfo():
                bounds = {
                    side: getattr(bound, side)
                    for bound in fact.metadata
                    for side in ("ge", "le")
                    if hasattr(bound, side)
                }
    if kind is bool and not words:
        words = "1 or 0, true or false, yes or no, on or off"
    if bounds:
        number = "a number" if kind is float else "a whole number"
        words = f"{number} from {bounds['ge']:g} to {bounds['le']}"
    return tuple(names), words


def _is_header_text(text: str) -> bool:
    return text.isascii() and text.isprintable()


def is_short_text(value: object) -> bool:
    """Whether a value is a printable text of at most a thousand characters, and not empty."""
    return isinstance(value, str) and value.isprintable() and 1 <= len(value) <= MAX_TEXT_CHARACTERS


def is_key(text: str) -> bool:
    """Whether a text can be sent as a key: nothing that a header or a log would break on."""
    return _is_header_text(text) and " " not in text


Text = Annotated[
    str, matching(str.isprintable, f"at most {MAX_TEXT_CHARACTERS} printable characters")
]
HeaderText = Annotated[
    str, matching(_is_header_text, f"at most {MAX_TEXT_CHARACTERS} ASCII characters in one line")
]
Key = Annotated[
    str, matching(is_key, f"at most {MAX_TEXT_CHARACTERS} ASCII characters without blanks")
]


def is_place(text: str) -> bool:
    """Whether a text is a host's name or address, ``[IPv6]``, with a port or without."""
    found = _PLACE.fullmatch(text)
    if found is None or not 1 <= int(found["port"] or 1) <= MAX_PORT:
        return False
    if found["ipv6"] is not None:
        return "/" not in found["ipv6"] and is_network(found["ipv6"])
    return len(found["name"]) <= MAX_HOST_CHARACTERS


def is_host_address(text: str) -> bool:
    """Whether a text is a host's name or address, an IPv6 address without brackets."""
    return is_place(f"[{text}]") if ":" in text else is_place(text)


def is_network(text: str) -> bool:
    """Whether a text is an address or a network, also with bits set beyond its mask."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def is_web_address(text: str) -> bool:
    """Whether a text is an http or https address of a host, without user, query and fragment."""
    if not is_key(text) or set(text) & set("?#@\\"):
        return False
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and is_place(parts.netloc)


def parse_web_address(text: str) -> str:
    """An http or https address without a slash at its end. Raises ValueError."""
    if len(text) > MAX_TEXT_CHARACTERS or not is_web_address(text):
        raise ValueError
    return text.rstrip("/")


def split_words(text: str) -> list[str]:
    """What stands between commas, without blanks around it."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks separated by commas. Raises ValueError."""
    return tuple(ip_network(word, strict=False) for word in split_words(text))


def quote_user(address: str) -> str:
    """The address with its user and password quoted, whatever characters stand in them.

    They end at the last ``@``. A percent sign with two hexadecimal digits is taken for quoted.
    """
    scheme, separator, rest = address.partition("://")
    user_and_password, at, place = rest.rpartition("@")
    if not at or rest.startswith("/"):
        return address
    user, colon, password = user_and_password.partition(":")
    return f"{scheme}{separator}{_quote_once(user)}{colon}{_quote_once(password)}@{place}"


def _quote_once(text: str) -> str:
    return quote(unquote_to_bytes(text), safe="")


HostAddress = Annotated[
    str, matching(is_host_address, "a name or address of a host, without a port")
]
WebAddress = Annotated[
    str,
    Read(
        parse_web_address,
        "an http or https address such as https://example.com, without user and query",
    ),
]
Networks = Annotated[
    tuple[Network, ...],
    Read(parse_networks, "networks such as 10.0.0.0/8, separated by commas"),
]


def iter_settings(*kinds: type) -> Iterator[tuple[str, str]]:
    """Each variable of some dataclasses once, with what it may be."""
    seen: set[str] = set()
    for kind in kinds:
        for names, words in describe_settings(cast(Hashable, kind)):
            for name in names:
                if name not in seen:
                    seen.add(name)
                    yield name, words
