# SPDX-License-Identifier: AGPL-3.0-or-later
"""Kinds of settings that the API and the front share: how the text of each is read, and which
follow from others. The settings themselves are in ``config`` and ``front_config``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Annotated, ClassVar
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from pydantic import ConfigDict

from horde.settings import (
    MAX_PORT,
    READING,
    HostAddress,
    Read,
    Text,
    is_place,
    is_short_text,
    is_web_address,
    matching,
    named,
    one_of,
    quote_user,
    read_settings,
    split_words,
    within,
)

# Keys made with it are worthless: development data is thrown away.
DEVELOPMENT_SECRET = "development-only-secret"
CHAT_SIGNAL_DATABASE = 7  # of Redis: completion events, stream leases and streams
CONTEXT_FITS = ("grow", "reject", "truncate_oldest")  # a test holds them to the contract's
MAX_LIMIT_AMOUNT = 1_000_000
DAY_SECONDS = 86_400

# Those of redis-py's address options that are of use to an operator; None is any text.
REDIS_OPTIONS: Mapping[str, frozenset[str] | None] = {
    "db": frozenset(map(str, range(16))),
    "username": None,
    "password": None,
    "ssl_ca_certs": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_cert_reqs": frozenset({"none", "optional", "required"}),
    "ssl_check_hostname": frozenset({"true", "false"}),
}

_LIMIT = re.compile(
    r"([0-9]{1,7}) ?(?:/|per) ?(?:[1-9][0-9]{0,2} ?)?(?:second|minute|hour|day|month|year)s?"
)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_SERVERS = re.compile(r"(?P<hosts>[^/?]*)(?:/(?P<database>[^/?]*))?(?:\?(?P<options>.*))?")


def parse_database_url(text: str) -> str:
    """The address of the database as SQLAlchemy reads it, the driver named and the password quoted.

    Operators paste plain postgresql:// addresses. Raises ValueError.
    """
    scheme, separator, rest = quote_user(text).partition("://")
    if scheme not in {"postgres", "postgresql", "postgresql+psycopg2"} or not text.isprintable():
        raise ValueError
    user, at, place = rest.rpartition("@") if not rest.startswith("/") else ("", "", rest)
    found = _SERVERS.fullmatch(place)
    if found is None or user.startswith(":"):
        raise ValueError
    *hosts, last = found["hosts"].split(",")
    if found["hosts"] and not (is_place(last) and all(is_place(f"{host}:1") for host in hosts)):
        raise ValueError
    options = parse_qs(found["options"] or "", strict_parsing=bool(found["options"]))
    if not (found["hosts"] or "host" in options) or "#" in place:
        raise ValueError
    return f"postgresql+psycopg2{separator}{user}{at}{place}"


def parse_redis_url(text: str) -> str:
    """The address of Redis with its password quoted. Raises ValueError."""
    url = quote_user(text)
    parts = urlsplit(url)
    if not text.isprintable() or parts.fragment:
        raise ValueError
    for name, value in parse_qsl(parts.query, strict_parsing=bool(parts.query)):
        values = REDIS_OPTIONS.get(name, frozenset())
        if values is not None and value not in values:
            raise ValueError
    place = parts.netloc.rpartition("@")[2]
    database = parts.path.removeprefix("/")
    if parts.scheme == "unix":
        is_usable = parts.path.startswith("/") and not place
    else:
        is_usable = is_place(place) and (not database or database.isdecimal())
    if parts.scheme not in {"redis", "rediss", "unix"} or not is_usable:
        raise ValueError
    return url


def build_redis_url(url: str, database: int) -> str:
    """The address of one logical database of Redis; whatever database the given one names is
    replaced.
    """
    parts = urlsplit(url)
    options = [option for option in parse_qsl(parts.query) if option[0] != "db"]
    if parts.scheme == "unix":  # urlunsplit would drop the slashes of an empty host
        query = urlencode([*options, ("db", str(database))])
        return f"unix://{parts.netloc}{parts.path}?{query}"
    return urlunsplit(parts._replace(path=f"/{database}", query=urlencode(options)))


def parse_limit(text: str) -> str:
    """Rate limits such as ``2/second;90/minute``, as the library under the limiter reads them.
    Raises ValueError.
    """
    for part in text.split(";"):
        found = _LIMIT.fullmatch(part.strip().lower())
        if found is None or not 1 <= int(found[1]) <= MAX_LIMIT_AMOUNT:
            raise ValueError
    return text


def parse_texts(text: str) -> tuple[str, ...]:
    """A JSON array of texts. Raises ValueError."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError from None
    if not isinstance(values, list) or not all(is_short_text(value) for value in values):
        raise ValueError
    return tuple(values)


def parse_aliases(text: str) -> tuple[str, ...]:
    aliases = parse_texts(text)
    if not all(re.fullmatch(r".+#[0-9]{1,18}", alias) for alias in aliases):
        raise ValueError
    return aliases


def parse_addresses(text: str) -> tuple[str, ...]:
    """Addresses and networks as the rest of the server spells them."""
    return tuple(
        str(ip_network(word, strict=False) if "/" in word else ip_address(word))
        for word in split_words(text)
    )


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins as browsers write them: one with a path, or in capitals, would match none."""
    origins = tuple(split_words(text))
    if not all(_ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


def _parse_place_of_database(text: str) -> str:
    if "@" in text:
        raise ValueError
    parse_database_url(f"postgresql://{text}")
    return text


def is_address_checker(text: str) -> bool:
    address, _, query = text.replace("{ip}", "0").partition("?")
    return "{ip}" in text and is_web_address(address) and query.isascii() and query.isprintable()


def parse_front_redis(text: str) -> str | None:
    """The address with the database of the chat streams unless it names one; None for `off`."""
    if text == "off":
        return None
    url = parse_redis_url(text)
    parts = urlsplit(url)
    is_path_database = parts.scheme != "unix" and parts.path.strip("/")
    if is_path_database or "db" in parse_qs(parts.query):
        return url
    return build_redis_url(url, CHAT_SIGNAL_DATABASE)


Limit = Annotated[
    str,
    Read(parse_limit, f"limits such as 2/second;90/minute, each of 1 to {MAX_LIMIT_AMOUNT}"),
]

Bucket = Annotated[
    str,
    matching(
        re.compile(r"[0-9A-Za-z._-]{3,255}").fullmatch, "3 to 255 letters, digits, dots and dashes"
    ),
]

Texts = Annotated[tuple[str, ...], Read(parse_texts, "a JSON array of texts")]

LogLevel = Annotated[
    str,
    one_of(debug="DEBUG", info="INFO", warning="WARNING", error="ERROR", critical="CRITICAL"),
]

REDIS_WORDS = "an address such as redis://:password@host:6379, rediss://host or unix:///path"

RedisUrl = Annotated[str, Read(parse_redis_url, REDIS_WORDS), named("REDIS_URL")]

IsDevelopment = Annotated[
    bool, one_of(production=False, development=True), named("HORDE_ENVIRONMENT")
]

LogsJson = Annotated[bool, one_of(json=True, text=False), named("HORDE_LOG_FORMAT")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseParts:
    """The address of the database as an AI Horde has it."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    place: Annotated[
        str,
        Read(_parse_place_of_database, "host:port/database"),
        named("POSTGRES_URL"),
    ]
    user: Annotated[Text, named("POSTGRES_USER")] = "postgres"
    password: Annotated[Text, named("POSTGRES_PASS")] = field(default="", repr=False)

    def build_url(self) -> str:
        """The address with everything quoted: a part is taken as it stands."""
        return f"postgresql://{quote(self.user, '')}:{quote(self.password, '')}@{self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisParts:
    """The address of Redis in parts."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    host: Annotated[HostAddress, named("REDIS_IP")] = "127.0.0.1"
    port: Annotated[int, within(1, MAX_PORT), named("REDIS_PORT")] = 6379
    password: Annotated[Text, named("REDIS_PASSWORD")] = field(default="", repr=False)

    def build_url(self) -> str:
        """The address with the password quoted: it is taken as it stands."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f":{quote(self.password, '')}@" if self.password else ""
        return f"redis://{user}{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What decides about other settings, of the API and the front alike."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    development: IsDevelopment = False
    redis_url: RedisUrl = "redis://127.0.0.1:6379"


def complete_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings with those that follow from others. Raises ConfigError."""
    values = dict(environment)
    if not is_set(values, "REDIS_URL"):
        values["REDIS_URL"] = read_settings(RedisParts, values).build_url()
    shared = read_settings(_Shared, values)
    values["REDIS_URL"] = shared.redis_url
    if not is_set(values, "HORDE_LOG_FORMAT"):
        values["HORDE_LOG_FORMAT"] = "text" if shared.development else "json"
    if shared.development and not is_set(values, "secret_key"):
        values["secret_key"] = DEVELOPMENT_SECRET
    return values


def is_set(values: Mapping[str, str], name: str) -> bool:
    return bool(values.get(name, "").strip())
