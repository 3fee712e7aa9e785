# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests that nobody should send, made from requests that somebody does: values, shapes, bytes
and headers gone wrong.

Everything is drawn from one `random.Random`, so a seed repeats a run. Nothing here knows the
application.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

# In every prompt, reply and tool description; must never come back in a refusal or a log line.
MARKER = "MARKER-7f3a"
KEY_MARK = "KEYMARK-91c2"  # in every key; must never come back at all


@dataclass(frozen=True)
class Raw:
    """JSON text to be written as it is, valid or not."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object with its keys in order, repeated ones included."""

    items: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Example:
    """A request that would be served; `body` None is a request without one."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    query: dict[str, str] = field(default_factory=dict)
    key: str | None = None  # whose request it is


@dataclass(frozen=True)
class Attack:
    """One request as sent; `path` and `query` are not yet quoted."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    data: bytes | None


STRINGS = (
    "",
    " ",
    "0",
    "true",
    "null",
    "None",
    "a" * 256,
    "x" * 70_000,
    "\U0001f600" * 60,
    "\u202egnp.exe\u202c",
    "e\u0301\u0327" * 40,
    "\ufeff\u200b\u2028",
    "\x1b[31m\x07\x7f\x85",
    "%s%n{0}{}${jndi:ldap://a}",
    "'; DROP TABLE users; --",
    "<script>alert(1)</script>",
    "../../../etc/passwd",
    "\u0660\u0661\u0662",
    "İıſK",
    "anonymous#0",
    "a#99999999999999999999",
    "a#-1",
    "00000000-0000-0000-0000-000000000000",
    "{00000000-0000-0000-0000-000000000000}",
    "urn:uuid:00000000-0000-0000-0000-000000000000",
    "http://127.0.0.1/",
    "https://[::1",
    "https://a:99999999/",
    "data:image/png;base64,AAAA",
    "data:;base64,",
)
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1.0,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**30,
    10**300,
    5e-324,
    1.7976931348623157e308,
)
TOKENS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1e-999",
    "9" * 309,
    "9" * 5000,
    "0." + "9" * 5000,
    "1e99999999999",
    "-0",
    "01",
    "0x10",
    "'single'",
    '"\\u0000"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\x"',
    '"line\nbreak"',
    "undefined",
    "",
    ",",
    "/* comment */ 1",
)
SHAPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [{}],
    {"a": []},
    [1] * 2000,
)
DEPTHS = (20, 64, 99, 101, 1000, 100_000)

HEADER_TEXTS = (
    "",
    " ",
    "unknown",
    "127.0.0.1",
    "127.0.0.1, ::1, 10.0.0.1",
    "::ffff:127.0.0.1",
    "fe80::1%eth0",
    "999.1.1.1",
    "0x7f.1",
    ",,,,",
    "a:b:c:d:e",
    ":::",
    "x" * 8000,
    "\xff\xfe",
    "\t",
    "\x01",
    '"quoted',
    "a;b=c;q=0.5",
    "é" * 500,
)
FIELD_MASKS = (
    "*",
    "id",
    "{id}",
    "{",
    "}",
    "{}",
    "}{",
    "a{b",
    "a{b}}",
    "{id,}",
    ",",
    "id,,id",
    "{}{}",
    "a{",
    "id{a{b{c}}}",
    "generations{text,kudos{a}}",
    "*{*{*}}",
    "\x01",
    "é",
    "a{" * 1000 + "b" + "}" * 1000,
    "{" * 4000,
    ",".join(f"f{number}" for number in range(1000)),
)
CONTENT_TYPES = (
    "application/json",
    "application/json; charset=utf-8",
    "application/json; charset=utf-16",
    "application/json; charset=\x01",
    "application/vnd.api+json",
    "APPLICATION/JSON",
    "application/json, text/plain",
    "text/plain",
    "text/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "json",
    "",
    ";;;",
)
ENCODINGS = ("gzip", "identity", "br", "deflate, gzip", "IDENTITY", "x", "")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW")


def render(value: Any) -> str:
    """JSON text of a value that may hold `Raw` and `Pairs`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return (
            "{" + ",".join(f"{json.dumps(key)}:{render(child)}" for key, child in value.items) + "}"
        )
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(key)}:{render(child)}" for key, child in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(render(child) for child in value) + "]"
    return json.dumps(value)


def nest(depth: int, inner: str = "1") -> Raw:
    """Arrays and objects in turn, as deep as asked."""
    pairs = depth // 2
    return Raw('[{"a":' * pairs + inner + "}]" * pairs)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a body are, the body itself left out."""
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [
        found
        for key, child in children
        for found in ((*path, key), *list_paths(child, (*path, key)))
    ]


def get_at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for step in path:
        value = value[step]
    return value


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copied


class Attacker:
    """Draws attacks; `keys` are the API keys it may use, `texts` more strings worth trying, such as
    ids that exist.
    """

    def __init__(self, random: Random, keys: Sequence[str], texts: Sequence[str] = ()) -> None:
        self.random = random
        self.keys, self.texts = keys, texts

    def draw(self, example: Example) -> Attack:
        """The example with something wrong, or rarely with nothing."""
        return Attack(
            method=example.method if self.random.random() < 0.98 else self.random.choice(METHODS),
            path=self.draw_path(example.path),
            query=self.draw_query(example.query),
            headers=self.draw_headers(example),
            data=None if example.body is None else self.draw_body(example.body),
        )

    def draw_path(self, path: str) -> str:
        """The path with its last segment replaced where that is an id or a name, and rarely with a
        flaw.
        """
        chance = self.random.random()
        if chance < 0.02:
            flaws = (
                path + "/",
                path.replace("/v2", "//v2"),
                path + "/%00",
                path + "\x00",
                path + "/..",
                path.upper(),
                path + "?",
            )
            return self.random.choice(flaws)
        if path.endswith("/*"):
            return path[:-1] + self.draw_text()
        return path

    def draw_query(self, query: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """Query parameters with hostile values; one may come twice."""
        drawn = [
            (name, value if self.random.random() < 0.5 else self.draw_text())
            for name, value in query.items()
        ]
        if self.random.random() < 0.05:
            drawn.append((self.random.choice([*query, "apikey", "x"]), self.draw_text()))
        return tuple(drawn)

    def draw_headers(self, example: Example) -> tuple[tuple[str, str], ...]:
        """A good key mostly; the other headers mostly absent."""
        headers: dict[str, str] = {}
        chance = self.random.random()
        if chance < 0.8 and example.key is not None:
            headers["apikey"] = example.key
        elif chance < 0.9:
            headers["apikey"] = self.random.choice(self.keys)
        elif chance < 0.97:
            headers["apikey"] = self.random.choice(
                [*HEADER_TEXTS, KEY_MARK, KEY_MARK + "\xe9", KEY_MARK * 100]
            )
        if example.body is not None:
            usual = self.random.random() < 0.95
            headers["Content-Type"] = (
                CONTENT_TYPES[0] if usual else self.random.choice(CONTENT_TYPES)
            )
        for name, texts, share in (
            ("Client-Agent", HEADER_TEXTS, 0.1),
            ("Proxied-For", HEADER_TEXTS, 0.1),
            ("Proxy-Authorization", (KEY_MARK, *HEADER_TEXTS), 0.1),
            ("X-Forwarded-For", HEADER_TEXTS, 0.1),
            ("X-Fields", FIELD_MASKS, 0.15),
            ("Content-Encoding", ENCODINGS, 0.02),
            ("Accept", ("text/html", "application/xml", "*/*;q=0", "x"), 0.03),
            ("Origin", HEADER_TEXTS, 0.02),
            ("Expect", ("100-continue", "x"), 0.01),
            ("Range", ("bytes=0-1", "x"), 0.01),
            ("If-None-Match", ("*", "x"), 0.01),
            ("Idempotency-Key", HEADER_TEXTS, 0.02),
        ):
            if self.random.random() < share:
                headers[name] = self.random.choice(texts)
        return tuple(headers.items())

    def draw_body(self, body: dict[str, Any]) -> bytes:
        """The body with one to three faults in its values, and rarely in its bytes."""
        changed: Any = body
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            changed = self.change_value(changed)
        data = render(changed).encode("utf-8", "surrogatepass")
        return self.change_bytes(data) if self.random.random() < 0.06 else data

    def change_value(self, body: Any) -> Any:
        """One fault somewhere in the body."""
        paths = list_paths(body)
        if not paths or self.random.random() < 0.01:
            return self.draw_value()
        path = self.random.choice(paths)
        parent, key, value = get_at(body, path[:-1]), path[-1], get_at(body, path)
        acts: list[Callable[[], Any]] = [
            lambda: replace_at(body, path, self.draw_value()),
            lambda: replace_at(body, path, self.draw_near(value)),
            lambda: replace_at(
                body,
                path,
                self.random.choice(([value], {"a": value}, [value] * 2, str(type(value)))),
            ),
        ]
        if isinstance(parent, dict):
            rest = {name: child for name, child in parent.items() if name != key}
            unknown = self.random.choice(
                (
                    "x",
                    "",
                    "\ud800",
                    "\x00",
                    "__proto__",
                    "id",
                    "n",
                    "models",
                    key.upper(),
                    key + " ",
                )
            )
            acts += [
                lambda: replace_at(body, path[:-1], rest),
                lambda: replace_at(body, path[:-1], parent | {unknown: self.draw_value()}),
                lambda: replace_at(
                    body, path[:-1], Pairs((*parent.items(), (key, self.draw_value())))
                ),
            ]
        elif isinstance(parent, list):
            times = self.random.choice((2, 10, 130, 1100))
            acts.append(lambda: replace_at(body, path[:-1], (parent * times)[:2000]))
        return self.random.choice(acts)()

    def draw_near(self, value: Any) -> Any:
        """A value a little beside a good one."""
        if isinstance(value, bool) or value is None:
            return self.random.choice((1, 0, "true", not value, None))
        if isinstance(value, int):
            near = (
                value + 1,
                value - 1,
                -value,
                float(value),
                str(value),
                value * 1000,
                value + 0.5,
                Raw(f"{value}.0"),
                [value],
            )
            return self.random.choice(near)
        if isinstance(value, float):
            return self.random.choice((-value, value + 1e-9, value * 10, int(value), str(value)))
        if isinstance(value, str):
            quoted = json.dumps(value)[1:-1]
            tails = (
                "\\u0000",
                "\\ud800",
                "\\udc00",
                "\\ud83d\\ude00",
                "\\u202e",
                "\\ufffe",
                "é",
                " ",
                "\\n",
                "\\",
            )
            changed = (
                Raw(f'"{quoted}{self.random.choice(tails)}"'),
                value.upper(),
                value * 50,
                value[:-1],
                [value],
                f" {value}",
            )
            return self.random.choice(changed)
        return self.draw_value()

    def draw_value(self) -> Any:
        """Something hostile of any kind."""
        kind = self.random.random()
        if kind < 0.3:
            return self.draw_text()
        if kind < 0.5:
            return self.random.choice(NUMBERS)
        if kind < 0.7:
            return Raw(self.random.choice(TOKENS))
        if kind < 0.9:
            return self.random.choice(SHAPES)
        return nest(self.random.choice(DEPTHS))

    def draw_text(self) -> str:
        """A hostile string, or one that means something here."""
        return self.random.choice((*STRINGS, *self.texts))

    def change_bytes(self, data: bytes) -> bytes:
        """One fault in the bytes of a body."""
        place = self.random.randrange(len(data) + 1)
        junk = bytes(self.random.randrange(256) for _ in range(self.random.choice((1, 4, 50))))
        return self.random.choice(
            (
                data[:place],
                data[:place] + junk + data[place:],
                data[:place] + junk + data[place + len(junk) :],
                b"\xef\xbb\xbf" + data,
                data.decode("utf-8", "replace").encode("utf-16"),
                gzip.compress(data, 1),
                b"",
                junk,
                data + data,
                b"[" * 100_000,
                b'{"a":' * 20_000,
                b"\x00" * 100,
                b"model=a&prompt=b",
            )
        )
