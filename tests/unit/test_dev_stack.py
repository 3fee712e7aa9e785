# SPDX-License-Identifier: AGPL-3.0-or-later
"""The supervisor's files and words."""

import ast
import json
import shlex
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from devtools import command_line, commands, stack
from devtools.launcher import RestartBudget
from devtools.processes import Child, StartFailed, find_unprivileged_account, is_port_free
from devtools.state import make_state_folder

ROOT = Path(__file__).resolve().parent.parent.parent

HOLDER = """
import sys, time
from pathlib import Path
from devtools import stack
with stack.hold_state(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_printed_request_is_valid_for_a_shell() -> None:
    command = stack.build_example("http://127.0.0.1:7001/api", "a'key", "some/model")[0]
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "some/model"
    assert (body["temperature"], body["max_tokens"]) == (0, 64)
    assert body["messages"][0] == {
        "role": "system",
        "content": "You are a helpful assistant. Answer briefly.",
    }
    assert "apikey: a'key" in words
    assert words[2] == "http://127.0.0.1:7001/api/v2/generate/chat/async"


def test_the_printed_python_is_whole_whatever_the_key() -> None:
    shell, *lines, end = stack.build_openai_example(
        "http://127.0.0.1:7010", "a'k\\ey", "some/model"
    )
    assert (shell, end) == (".venv/bin/python <<'END'", "END")
    calls = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Call)]
    said = [
        {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg != "messages"}
        for call in calls
    ]
    assert {"base_url": "http://127.0.0.1:7010/v1", "api_key": "a'k\\ey"} in said
    assert {"model": "some/model", "temperature": 0, "max_tokens": 64} in said


def test_the_stop_command_survives_spaces() -> None:
    assert shlex.split(stack.describe_stop(Path("/a b")))[-1] == "/a b"


def test_a_state_has_one_supervisor_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        assert stack.read_holder(tmp_path) == holder.pid
        with (
            pytest.raises(StartFailed, match=r"a stack runs in .* already"),
            stack.hold_state(tmp_path),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert stack.read_holder(tmp_path) is None
    with stack.hold_state(tmp_path):
        pass


def test_stopping_what_does_not_run_removes_the_stale_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert stack.stop(tmp_path) == 0
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("inside", ["", "deeper", "deeper/still"])
@pytest.mark.parametrize("command", ["run", "stop"])
def test_a_state_that_is_a_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, inside: str
) -> None:
    """Nothing is started, and nobody reads a traceback."""
    (tmp_path / "file").touch()
    words = [command, "--state", str(tmp_path / "file" / inside)]
    code = commands.run(command_line.parse([*words, *(["--no-worker"] * (command == "run"))]))
    said = capsys.readouterr()
    if command == "stop" and inside:
        assert (code, said.err) == (0, "")  # nothing can run there
        return
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / 'file'} is no folder" in said.err


def test_a_state_that_may_not_be_written_to_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / ("x" * 300)  # nobody can make it, not even root
    assert commands.run(command_line.parse(["run", "--no-worker", "--state", str(state)])) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_state_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secrets.json").write_text('{"postgres_pass')
    assert commands.run(command_line.parse(["run", "--no-worker", "--state", str(tmp_path)])) == 2
    assert "is damaged; remove" in capsys.readouterr().err


def test_a_port_for_two_servers_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--port", "7005", "--front-port", "7005", "--state", str(tmp_path)]
    assert commands.run(command_line.parse(words)) == 2
    assert "they have to differ" in capsys.readouterr().err


def test_a_port_of_root_is_refused_by_its_reason() -> None:
    """As an account that may not have it sees it: port 80 is not taken, it is not allowed."""
    limit = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if limit.exists() and int(limit.read_text()) <= 80:
        pytest.skip("everybody may listen on port 80 here")
    account = find_unprivileged_account()
    program = "import os; from devtools.processes import *\n"
    program += f"os.setuid({account.uid})\n" if account else ""
    program += "try: check_port_permitted(80)\nexcept CannotRun as error: print(error)"
    words = [sys.executable, "-c", program]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "port 80 may be used by root alone" in answer.stdout


def test_a_folder_that_was_there_keeps_its_permissions(tmp_path: Path) -> None:
    """`--state /tmp` must not close /tmp to everybody else."""
    tmp_path.chmod(0o777)
    make_state_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777


def test_restarts_of_long_ago_are_forgotten() -> None:
    now = [0.0]
    budget = RestartBudget(lambda: now[0])
    assert [budget.take("api") for _ in range(6)] == [True] * 5 + [False]
    assert budget.take("front")
    now[0] = 700
    assert budget.take("api")


def test_a_program_is_started_again_once_its_port_is_free(tmp_path: Path) -> None:
    """An orphan that holds the port would use up the restarts."""
    holder = socket.create_server(("127.0.0.1", 0))
    child = Child("x", ["/bin/true"], tmp_path / "log", port=holder.getsockname()[1])
    threading.Timer(0.3, holder.close).start()
    child.wait_for_port(20)
    assert is_port_free(child.port or 0)


def test_the_wait_for_a_port_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        child = Child("x", ["/bin/true"], tmp_path / "log", port=holder.getsockname()[1])
        started = time.monotonic()
        child.wait_for_port(0.1)
    assert time.monotonic() - started < 60


def test_a_failing_command_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="ended with 3\nout\nerr"):
        stack.run_program(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], {}, tmp_path)
