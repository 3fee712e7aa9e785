# SPDX-License-Identifier: AGPL-3.0-or-later
"""The supervisor's files and words."""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import stack
from devtools.processes import StartFailed

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


def test_a_failing_command_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="ended with 3\nout\nerr"):
        stack.run_program(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], {}, tmp_path)
