# SPDX-License-Identifier: AGPL-3.0-or-later
"""Finding a Python, with real interpreters' stand-ins: small scripts that say what a real one
would.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import bootstrap, command_line
from horde.cli import bridge

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_BY_OLD_PYTHONS = (
    "dev.py",
    "devtools/__init__.py",
    "devtools/bootstrap.py",
    "devtools/command_line.py",
)


def make_interpreter(folder: Path, name: str, script: str) -> str:
    """An executable that answers a probe with this shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def say_version(version: str, executable: str = "/somewhere/python") -> str:
    """The script of a good interpreter."""
    return f"echo {version}; echo {executable}"


@pytest.mark.parametrize("name", RUN_BY_OLD_PYTHONS)
def test_python_3_8_can_read(name: str) -> None:
    ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("name", RUN_BY_OLD_PYTHONS)
def test_only_the_standard_library_is_needed_to_begin(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    imported = {
        alias.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {
        str(node.module).partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)
    }
    assert imported <= {*sys.stdlib_module_names, "devtools"}


def test_this_interpreter_fits() -> None:
    assert bootstrap.probe(sys.executable).refusal == ""


def test_a_shim_that_fails_is_refused_with_its_words(tmp_path: Path) -> None:
    shim = make_interpreter(
        tmp_path, "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    )
    assert bootstrap.probe(shim).refusal == "pyenv: python3.12: command not found"


def test_an_old_interpreter_is_refused_with_its_version(tmp_path: Path) -> None:
    assert (
        bootstrap.probe(make_interpreter(tmp_path, "python3", say_version("3 9 18"))).refusal
        == "version 3.9.18"
    )


def test_an_interpreter_without_ensurepip_is_refused_with_the_package_that_has_it(
    tmp_path: Path,
) -> None:
    """Debian's Python 3.13 needs python3.13-venv, whatever version this project was made
    with.
    """
    script = f"{say_version('3 13 5')}; echo it lacks ensurepip >&2; exit 1"
    assert bootstrap.probe(make_interpreter(tmp_path, "python3", script)).refusal == (
        "it lacks ensurepip; on Debian and Ubuntu `apt install python3.13-venv` adds it"
    )


def test_an_old_interpreter_without_ensurepip_is_refused_for_its_age(tmp_path: Path) -> None:
    script = f"{say_version('3 11 2')}; echo it lacks ensurepip >&2; exit 1"
    assert (
        bootstrap.probe(make_interpreter(tmp_path, "python3", script)).refusal == "version 3.11.2"
    )


def test_the_probe_names_a_module_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError('no', name='ensurepip')")
    words = [sys.executable, "-c", bootstrap.PROBE]
    answer = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (1, "it lacks ensurepip\n")
    assert answer.stdout.startswith("{} {} {}\n".format(*sys.version_info[:3]))


def test_a_folder_that_cannot_be_written_to_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bootstrap, "ROOT", str(tmp_path / "file"))
    with pytest.raises(bootstrap.SetupError, match="cannot write to"), bootstrap.setup_lock():
        pass


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999", "http", ""])
@pytest.mark.parametrize("option", ["--port", "--front-port"])
def test_a_number_that_is_no_port_is_one_sentence(
    option: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["run", f"{option}={port}"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"{port!r} is no port" in said.err


def test_services_on_this_machine_are_never_asked_for_through_a_proxy() -> None:
    environment = {"no_proxy": "example.com, 127.0.0.1", "HTTP_PROXY": "http://proxy:3128"}
    command_line.keep_loopback_direct(environment)
    assert environment["no_proxy"] == "example.com,127.0.0.1,localhost,::1"
    assert environment["NO_PROXY"] == "localhost,127.0.0.1,::1"


def test_the_real_path_behind_a_shim_is_used(tmp_path: Path) -> None:
    shim = make_interpreter(tmp_path, "python3.12", say_version("3 12 1", "/real/python3.12"))
    assert bootstrap.probe(shim).executable == "/real/python3.12"


def test_a_broken_shim_does_not_hide_what_stands_behind_it(tmp_path: Path) -> None:
    make_interpreter(tmp_path / "shims", "python3.12", "exit 127")
    behind = make_interpreter(tmp_path / "usr", "python3.12", say_version("3 12 1"))
    environment = {"PATH": f"{tmp_path / 'shims'}:{tmp_path / 'usr'}", "HOME": str(tmp_path)}
    found = [
        path for path in bootstrap.list_candidates(environment) if path.startswith(str(tmp_path))
    ]
    assert found == [str(tmp_path / "shims" / "python3.12"), behind]


def test_pyenv_versions_are_sorted_by_number_and_old_ones_left_out(tmp_path: Path) -> None:
    for version in ("3.9.18", "3.13.0", "3.12.1", "3.8.18", "3.12.11"):
        make_interpreter(tmp_path / "versions" / version / "bin", "python3", "exit 1")
    environment = {"PATH": "", "HOME": str(tmp_path / "home"), "PYENV_ROOT": str(tmp_path)}
    found = [
        path for path in bootstrap.list_candidates(environment) if path.startswith(str(tmp_path))
    ]
    assert [bootstrap.version_in_path(path) for path in found] == [
        (3, 12, 11),
        (3, 12, 1),
        (3, 13, 0),
    ]


def test_the_override_is_the_only_candidate(tmp_path: Path) -> None:
    override = make_interpreter(tmp_path, "mine", "echo no >&2; exit 1")
    with pytest.raises(
        bootstrap.SetupError, match=r"mine \(no\); point HORDE_PYTHON at another one or unset it"
    ):
        bootstrap.find_python({"HORDE_PYTHON": override})


def test_the_refusal_says_what_was_tried_and_what_to_do() -> None:
    text = bootstrap.describe_refusals(
        [bootstrap.Probe("/usr/bin/python3", "", "version 3.9.2")], is_override=False
    )
    assert "/usr/bin/python3 (version 3.9.2)" in text
    assert "HORDE_PYTHON" in text
    assert text.count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["run"], True),
        (["run", "--detach", "--port", "7002"], True),
        (["run", "--no-worker"], False),
        (["run", "--backend", "http://127.0.0.1:8080"], False),
        (["test", "-x"], False),
        (["stop"], False),
    ],
)
def test_the_model_is_fetched_only_for_a_run_that_serves_it(words: list[str], needed: bool) -> None:
    assert command_line.needs_demo_model(command_line.parse(words)) is needed


def test_a_run_with_a_backend_takes_the_options_that_its_worker_needs() -> None:
    words = ["--max-context-length=8192", "--supports=tools", "--supports=seed", "--no-text"]
    parsed = command_line.parse(["run", "--backend", "http://127.0.0.1:8080", *words])
    assert command_line.list_worker_words(parsed) == words
    assert command_line.list_worker_words(command_line.parse(["run"])) == []


def test_the_options_of_the_bridge_that_are_about_its_backend_are_those_of_a_run() -> None:
    bridge_parser = argparse.ArgumentParser(add_help=False)
    bridge.add_arguments(bridge_parser)
    known = {option for action in bridge_parser._actions for option in action.option_strings}
    given_by_the_run = {"--api", "--key", "--name", "--backend", "--backend-key", "--bridge-agent"}
    about_the_process = {"--grace-seconds", "--log-level", "--log-format"}
    handed_on = {
        *command_line.WORKER_OPTIONS,
        *command_line.WORKER_LISTS,
        *command_line.WORKER_FLAGS,
    }
    assert known == handed_on | given_by_the_run | about_the_process


def test_options_after_test_belong_to_pytest() -> None:
    assert command_line.parse(["test", "-k", "chat", "--pdb"]).rest == ["-k", "chat", "--pdb"]


def test_the_state_folder_is_that_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.parse(["run", "--state", "here"]).state == str(tmp_path / "here")
