# SPDX-License-Identifier: AGPL-3.0-or-later
"""The installation of docker-compose.yml as processes: the same commands and settings, other ports.

What the file says about containers alone (images, networks, logs) is read in
tests/unit/test_compose.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from devtools.launcher import Launcher
from devtools.postgres import Postgres, remove_external_data
from devtools.processes import Child, find_free_ports, is_port_free
from devtools.store import PARTS, find_store_ports
from devtools.valkey import find_valkey_server
from tests.acceptance._compose import Service, parse_env, read_instruction, read_services
from tests.services import ROOT

SECONDS = 120
HOST, STORE_HOST = "127.0.0.1", "127.0.0.2"  # what stands for the container, and for its neighbours
HORDE = [sys.executable, "-m", "horde.cli.main"]
TOKEN = "compose-of-the-tests"

ENV = """
SECRET_KEY='s/a:l@t # $HOME 100% "quoted" \\back'
POSTGRES_PASSWORD='p/a:s@s#w?o%r d+"$x\\y'
REDIS_PASSWORD='r/e:d@i#s?%25 +$x'
S3_ACCESS_KEY='access'
S3_SECRET_KEY='s/3:k@e#y?%+='
ADMINS='["admin#1"]'
HORDE_TITLE='A horde of "ours" & others'
HORDE_TRUSTED_PROXIES=127.0.0.0/8
HORDE_OAI_CORS_ORIGINS=https://chat.example
HORDE_SERVER_WORKERS=1
"""


class Installation:
    """The services of the file, each as a process on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services = read_services(parse_env(ENV))
        ports = find_free_ports(6)
        self.postgres = Postgres(
            folder,
            password=self.services["postgres"].environment["POSTGRES_PASSWORD"],
            token=TOKEN,
            durable=False,
        )
        (folder / "logs").mkdir()
        self.postgres_child = self.postgres.build()
        self.redis_port, self.api_port, self.front_port, *self.metrics_ports = ports[:5]
        self.store_ports = dict(zip(PARTS, find_store_ports()[: len(PARTS)], strict=True))
        # What a name of the file's network, or a port inside a container, is here.
        self.places = {
            "postgres:5432": f"{HOST}:{self.postgres.port}",
            "store:8333": f"{STORE_HOST}:{self.store_ports['s3']}",
            "api:7001": f"{HOST}:{self.api_port}",
            "127.0.0.1:7001": f"{HOST}:{self.api_port}",
            "127.0.0.1:7010": f"{HOST}:{self.front_port}",
        }
        self.launcher = Launcher(folder / "children.json")

    def adapt(self, text: str) -> str:
        """A text of the file with this machine's places in it."""
        for place, local in self.places.items():
            text = text.replace(place, local)
        return text

    def build_environment(self, name: str) -> dict[str, str]:
        """The settings of a container, and nothing of this process but the way to programs."""
        environment = {
            key: self.adapt(value) for key, value in self.services[name].environment.items()
        }
        local = {
            "REDIS_IP": HOST,
            "REDIS_PORT": str(self.redis_port),
            "HORDE_METRICS_LISTEN": HOST,
            "HORDE_METRICS_PORT": str(self.metrics_ports[0]),
            "HORDE_OAI_METRICS_PORT": str(self.metrics_ports[1]),
        }
        environment |= {key: value for key, value in local.items() if key in environment}
        path = [str(self.folder), str(find_valkey_server().parent), os.environ["PATH"]]
        return {"PATH": os.pathsep.join(path), "HOME": str(self.folder), **environment}

    def launch(self, name: str, command: list[str], ready: Any) -> Child:
        """Start one, as the file does, and wait for it unless `ready` is None."""
        child = Child(
            name,
            command,
            self.folder / "logs" / f"{name}.log",
            self.build_environment(name),
            working_directory=ROOT,
        )
        child.start()
        self.launcher.children.append(child)
        if ready is not None:
            child.wait_until(ready, SECONDS)
        return child

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """As `docker compose run --rm api …`."""
        return subprocess.run(
            [*HORDE, *words],
            cwd=ROOT,
            env=self.build_environment("api"),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def start(self) -> None:
        """Everything, the migration before its database."""
        migrate = self.launch("migrate", HORDE + self.services["migrate"].command, None)
        self.start_store(self.services["store"])
        self.start_redis(self.services["redis"])
        self.postgres_child.start()
        self.launcher.children.append(self.postgres_child)
        self.postgres_child.wait_until(self.postgres.is_ready, SECONDS)
        assert migrate.process is not None
        assert migrate.process.wait(SECONDS) == 0, migrate.read_log_tail()
        words = ["--listen", HOST, "--port"]
        api, front = read_instruction("CMD"), self.services["front"].command
        assert (api[0], api[1], api[-1]) == ("serve", "--listen", "7001")
        assert (front[0], front[1], front[-1]) == ("front", "--listen", "7010")
        self.launch("api", [*HORDE, "serve", *words, str(self.api_port)], self.answers_at_api)
        self.launch("front", [*HORDE, "front", *words, str(self.front_port)], self.answers_at_front)

    def start_redis(self, service: Service) -> None:
        """As the image does, whose entry point starts the program as another user."""
        shell, *words = service.command
        entry = self.folder / "docker-entrypoint.sh"
        entry.write_text('#!/bin/sh\nexec "$@"\n')
        entry.chmod(0o755)
        self.launch(
            "redis",
            [f"/bin/{shell}", *words, "--bind", HOST, "--port", str(self.redis_port)],
            lambda _: not is_port_free(self.redis_port),
        )

    def start_store(self, service: Service) -> None:
        """Its parts on ports of this machine, the S3 part alone on the neighbours' address."""
        (self.folder / "store").mkdir()
        words = [
            word.replace("/data", str(self.folder / "store")).replace("0.0.0.0", STORE_HOST)
            for word in service.command
            if not word.startswith("-s3.port=")
        ]
        for part in ("master", "volume", "filer", "s3"):
            port, grpc = self.store_ports[part], find_free_ports(1)[0]
            words += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc}"]
        weed = Path(sys.executable).with_name("weed")
        health = service.raw["healthcheck"]["test"][-1]
        assert health.startswith("http://127.0.0.1:8333/")
        url = f"http://{STORE_HOST}:{self.store_ports['s3']}/{health.rpartition('/')[2]}"
        self.launch("store", [str(weed), *words], lambda _: answers(url))

    def answers_at_api(self, _child: Child) -> bool:
        """By the health check of the image."""
        return self.is_healthy(read_instruction("HEALTHCHECK"))

    def answers_at_front(self, _child: Child) -> bool:
        """By the health check of the file."""
        return self.is_healthy(self.services["front"].raw["healthcheck"]["test"][1:])

    def is_healthy(self, words: list[str]) -> bool:
        command = [sys.executable, *map(self.adapt, words[1:])]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("compose")
    made = Installation(folder)
    try:
        made.start()
        yield made
    finally:
        made.launcher.stop_all()
        remove_external_data(TOKEN)


@pytest.mark.slow
def test_the_installation_starts_with_secrets_of_any_characters(installation: Installation) -> None:
    """The database, Redis and the store are all reached, from the API and from commands."""
    heartbeat = httpx.get(f"http://{HOST}:{installation.api_port}/api/v2/status/heartbeat").json()
    assert heartbeat["message"] == "OK"
    for words in (["db", "status"], ["kudos", "audit"], ["store", "audit"]):
        answer = installation.run(*words)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    ready = httpx.get(f"http://{HOST}:{installation.front_port}/health/ready")
    assert ready.status_code == 200, ready.text


@pytest.mark.slow
def test_settings_of_the_env_file_act_in_the_containers(installation: Installation) -> None:
    made = json.loads(installation.run("user", "create", "--username", "admin").stdout)
    assert made["alias"] == "admin#1"
    api = f"http://{HOST}:{installation.api_port}"
    changed = httpx.put(
        f"{api}/api/v2/status/modes",
        json={"maintenance_mode": False},
        headers={"apikey": made["api_key"]},
    )
    assert changed.status_code == 200, changed.text
    assert "A horde of &#34;ours&#34; &amp; others" in httpx.get(f"{api}/register").text
    models = httpx.get(
        f"http://{HOST}:{installation.front_port}/v1/models",
        headers={"Origin": "https://chat.example"},
    )
    assert models.headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.slow
def test_figures_are_read_where_the_file_publishes_them(installation: Installation) -> None:
    api, front = (
        httpx.get(f"http://{HOST}:{port}/metrics").text for port in installation.metrics_ports
    )
    assert "horde_http_requests_total" in api
    assert "horde_oai_" in front


@pytest.mark.slow
def test_only_the_s3_part_of_the_store_is_reached_by_neighbours(installation: Installation) -> None:
    for part in ("master", "volume", "filer"):
        assert not answers(f"http://{STORE_HOST}:{installation.store_ports[part]}/")
        # It is up, where only the store itself reaches it.
        assert not is_port_free(installation.store_ports[part])
