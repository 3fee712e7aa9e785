# SPDX-License-Identifier: AGPL-3.0-or-later
"""docker-compose.yml without Docker: read, filled from a .env, and its services as processes."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.services import ROOT

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:[-?])([^}]*))?\}")


class Unset(Exception):
    """A variable without a value that has to have one, as `docker compose` refuses it."""


@dataclass(frozen=True)
class Service:
    """One service as Docker would start it: `command` is what follows the image's entry point."""

    name: str
    command: list[str]
    environment: dict[str, str]
    raw: dict[str, Any]


def parse_env(text: str) -> dict[str, str]:
    """The variables of a .env file, whose values stand in single quotes or bare."""
    found = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[name.strip()] = value[1:-1] if value.startswith("'") else value.strip()
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Fill `${NAME}`, `${NAME:-default}` and `${NAME:?}`; `$$` is a dollar. Raises Unset."""

    def fill(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, operator, rest = match.groups()
        value = variables.get(name, "")
        if not value and operator == ":?":
            raise Unset(name)
        return value or (rest if operator == ":-" else "")

    return _VARIABLE.sub(fill, text)


def expand_all(value: Any, variables: Mapping[str, str]) -> Any:
    """As `expand`, in every text of a parsed file.

    A value never becomes part of the file itself.
    """
    if isinstance(value, dict):
        return {key: expand_all(entry, variables) for key, entry in value.items()}
    if isinstance(value, list):
        return [expand_all(entry, variables) for entry in value]
    return expand(value, variables) if isinstance(value, str) else value


def read_services(variables: Mapping[str, str], path: Path = COMPOSE) -> dict[str, Service]:
    """The services of the file, filled. Raises Unset."""
    document = expand_all(yaml.safe_load(path.read_text()), variables)
    return {
        name: Service(
            name,
            [str(word) for word in raw.get("command", [])],
            {key: str(value) for key, value in raw.get("environment", {}).items()},
            raw,
        )
        for name, raw in document["services"].items()
    }


def read_instruction(name: str) -> list[str]:
    """The words of the last instruction of this name in the Dockerfile's JSON form."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith(name + " ")]
    words: list[str] = json.loads(lines[-1][lines[-1].index("[") :])
    return words
