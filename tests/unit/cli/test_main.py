# SPDX-License-Identifier: AGPL-3.0-or-later
import argparse
import http.server
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import requests

from horde.cli import bridge, main
from horde.config import VERSION

# A finder that refuses the server's packages, as if they were not installed.
BRIDGE_ONLY = """
import sys
MISSING = {"flask", "sqlalchemy", "redis", "boto3", "psycopg2", "starlette", "gunicorn"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
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


def test_a_proxy_of_the_environment_is_never_asked_for_services_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend on loopback, a store, a collector: each library asks the environment."""
    with serving() as url:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "internal.example")
        main.keep_loopback_direct(os.environ)
        assert os.environ["no_proxy"].startswith("internal.example,")
        for host in ("127.0.0.1", "localhost"):
            address = url.replace("127.0.0.1", host)
            assert httpx.get(address).status_code == 404  # as the bridge asks
            assert (
                requests.get(address, timeout=5).status_code == 404
            )  # as the collector is sent to
            with pytest.raises(urllib.error.HTTPError, match="404") as answer:
                urllib.request.urlopen(address, timeout=5)
            answer.value.close()


@contextmanager
def serving() -> Iterator[str]:
    """A server on loopback that answers with 404."""
    with http.server.HTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_every_command_keeps_services_of_this_machine_direct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setitem(main.COMMANDS, "nothing", "not there")
    main.main(["nothing"])
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "localhost,127.0.0.1,::1"


def test_the_version_needs_no_package_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"horde {VERSION}\n"


@pytest.mark.parametrize("key", ["-abc", "--key", "-"])
def test_a_key_may_begin_with_a_dash(key: str) -> None:
    words = main.join_keys(["--name", "w", "--key", key, "--threads", "2"], bridge.KEY_OPTIONS)
    assert words == ["--name", "w", f"--key={key}", "--threads", "2"]
    assert build_arguments(*words[2:]).key == key


@pytest.mark.parametrize(("value", "code"), [("", 1), ("no address", 2)])
def test_an_address_of_the_horde_is_judged_by_us_and_not_by_a_library(
    value: str, code: int
) -> None:
    environment = {"PATH": os.environ["PATH"], "HORDE_URL": value, "secret_key": "a"}
    environment["DATABASE_URL"] = "postgresql://127.0.0.1:1/none"
    done = subprocess.run(
        [sys.executable, "-m", "horde.cli.main", "db", "status"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("HORDE_URL" in done.stderr) == (code == 2)
