# SPDX-License-Identifier: AGPL-3.0-or-later
import argparse
import subprocess
import sys

import pytest

from horde.cli import bridge, main

# A finder that refuses the server's packages, as if they were not installed.
BRIDGE_ONLY = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flask", "sqlalchemy", "redis", "boto3", "psycopg2", "starlette", "gunicorn"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from horde.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def build_arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bridge.add_arguments(parser)
    return parser.parse_args(
        ["--api", "http://h.test/api/", "--backend", "http://b.test/v1", "--name", "w", *more]
    )


def test_the_bridge_runs_without_the_servers_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BRIDGE_ONLY, "bridge", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--exclude" in done.stdout


def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(main.COMMANDS, "nothing", "not there")
    assert main.main(["nothing"]) == 1
    assert "horde.cli.nothing is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["unknown"]])
def test_an_unknown_command_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    assert "usage: horde" in capsys.readouterr().err


def test_the_key_comes_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HORDE_BRIDGE_KEY", raising=False)
    assert bridge.run(build_arguments()) == 2
    assert "HORDE_BRIDGE_KEY" in capsys.readouterr().err


def test_options_become_a_configuration() -> None:
    args = build_arguments(
        "--no-text",
        "--exclude",
        "tools",
        "--exclude",
        "seed",
        "--supports",
        "reasoning_effort",
        "--threads",
        "3",
    )
    config = bridge.build_config(args, "k", None)
    assert (config.api_url, config.serves_text, config.threads) == ("http://h.test/api", False, 3)
    assert ({*config.exclude}, {*config.supports}) == ({"tools", "seed"}, {"reasoning_effort"})


def test_an_unknown_feature_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_arguments("--exclude", "telepathy")
    assert "telepathy" in capsys.readouterr().err
