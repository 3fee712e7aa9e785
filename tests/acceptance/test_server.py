# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde serve` as processes: what gunicorn answers by itself, the figures of all processes, and
the end.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from devtools.processes import find_free_ports, is_port_free, read_start_stamp
from devtools.services import ServiceAddresses
from horde.connections import SILENCE_SECONDS
from tests.services import ROOT, make_database

MARKER = "MARKER-7f3a"
HEARTBEAT = "/api/v2/status/heartbeat"
START_SECONDS = 60
CLOSE = "Connection: close\r\n"


@dataclass(frozen=True)
class RunningServer:
    """One `horde serve` with two processes."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    log: Path

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def scrape(self) -> str:
        """Its figures."""
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text

    def send(
        self, request: str, *, timeout_seconds: float = 20
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send bytes as they are; status, headers and body of the answer, which has to close the
        connection.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout_seconds) as connection:
            connection.sendall(request.encode("latin-1"))
            return parse_answer(read_all(connection))


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def parse_answer(answer: bytes) -> tuple[int, Mapping[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    return (
        int(first.split(" ")[1]),
        httpx.Headers([tuple(line.split(": ", 1)) for line in lines]),
        body,
    )  # type: ignore[misc]


@pytest.fixture(scope="module")
def environment(service_urls: ServiceAddresses) -> dict[str, str]:
    """The settings of a server on a database of its own, without a schema yet."""
    url = make_database(service_urls.database_url, "server")
    settings = {
        "DATABASE_URL": url,
        "HORDE_ENVIRONMENT": "development",
        "HORDE_LOG_FORMAT": "json",
        "HORDE_LOG_LEVEL": "DEBUG",
    }
    return {**os.environ, **service_urls.build_environment(), **settings}


def run_horde(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horde.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def migrated(environment: dict[str, str]) -> dict[str, str]:
    """The same, with the schema."""
    refused = run_horde(environment, "serve", "--port", str(find_free_ports(1)[0]))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "run `horde db migrate`" in refused.stderr
    assert run_horde(environment, "db", "migrate").returncode == 0
    return environment


@pytest.fixture(scope="module")
def server(
    migrated: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server that the tests of this module share. The last one ends it."""
    port, metrics_port = find_free_ports(2)
    log = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(migrated, port, metrics_port, log) as running:
        yield running


@contextmanager
def running_server(
    settings: Mapping[str, str], port: int, metrics_port: int, log: Path
) -> Iterator[RunningServer]:
    """A server that answers, on these ports; it is ended with the block unless it did so before."""
    environment = {**settings, "HORDE_METRICS_PORT": str(metrics_port)}
    command = [sys.executable, "-m", "horde.cli.main", "serve"]
    command += ["--port", str(port), "--workers", "2", "--threads", "4"]
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        running = RunningServer(process, port, metrics_port, log)
        wait_until(lambda: is_serving(running), START_SECONDS)
        yield running
    finally:
        process.terminate()
        process.wait(40)


def is_serving(server: RunningServer) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    try:
        return httpx.get(server.url + HEARTBEAT).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sum_series(scrape: str, name: str, **labels: str) -> float:
    """The sum of a figure over all processes."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in scrape.splitlines()
        if line.startswith(f"{name}{{")
        and all(f'{label}="{value}"' in line for label, value in labels.items())
    )


def test_what_the_server_refuses_by_itself_is_json_and_keeps_quiet(server: RunningServer) -> None:
    chunked = (
        f"PUT /api/v2/status/modes HTTP/1.1\r\nHost: a\r\n{CLOSE}apikey: a\r\nContent-Type:"
        " application/json\r\n"
    )
    requests = {
        f"{MARKER}\r\n\r\n": 400,
        f"GET / HTTP/1.1\r\nHost: a\r\napikey: {MARKER}\x00\r\n\r\n": 400,
        f"GET / HTTP/1.1\r\nHost: a\r\napikey: {MARKER * 1000}\r\n\r\n": 431,
        f"GET /{MARKER * 500} HTTP/1.1\r\nHost: a\r\n\r\n": 414,
        f"GET / HTTP/1.1\r\nHost: a\r\n{CLOSE}Transfer-Encoding: {MARKER}\r\n\r\n": 501,
        f"{chunked}Transfer-Encoding: chunked\r\n\r\nzz{MARKER}\r\n": 400,
        f"{chunked}Transfer-Encoding: chunked\r\n\r\n5\r\n{{{MARKER}\r\n": 400,
        f"GET /api/nope?{MARKER} HTTP/1.1\r\nHost: a\r\n{CLOSE}\r\n": 404,
    }
    for request, expected in requests.items():
        status, headers, body = server.send(request)
        assert (status, headers["content-type"]) == (
            expected,
            "application/json; charset=utf-8",
        ), request[:80]
        assert headers["access-control-allow-origin"] == "*"
        assert "message" in json.loads(body)
        assert MARKER not in body.decode()
    assert MARKER not in server.log.read_text()


def test_a_declared_body_over_the_bound_is_refused_unread(server: RunningServer) -> None:
    head = (
        f"PUT /api/v2/status/modes HTTP/1.1\r\nHost: a\r\n{CLOSE}apikey: a\r\nContent-Type:"
        " application/json\r\n"
    )
    started_at = time.monotonic()
    status, _, body = server.send(f"{head}Content-Length: 10485761\r\n\r\n{{")
    assert (status, json.loads(body)["rc"]) == (413, "RequestTooLarge")
    assert time.monotonic() - started_at < 30


@pytest.mark.slow
def test_a_client_that_stops_sending_gives_its_thread_back(server: RunningServer) -> None:
    head = (
        "PUT /api/v2/status/modes HTTP/1.1\r\nHost: a\r\napikey: a\r\nContent-Type:"
        " application/json\r\n"
    )
    in_head = socket.create_connection(("127.0.0.1", server.port), SILENCE_SECONDS + 10)
    in_body = socket.create_connection(("127.0.0.1", server.port), SILENCE_SECONDS + 10)
    with in_head, in_body:
        in_head.sendall(head.encode())
        in_body.sendall(f"{head}{CLOSE}Content-Length: 10\r\n\r\n{{".encode())
        assert parse_answer(read_all(in_head))[0] == 408
        status, _, body = parse_answer(read_all(in_body))
    assert (status, json.loads(body)["rc"]) == (400, "BadRequest")


@pytest.mark.slow
def test_clients_that_trickle_or_stall_leave_threads_for_others(server: RunningServer) -> None:
    head = (
        "PUT /api/v2/status/modes HTTP/1.1\r\nHost: a\r\napikey: a\r\nContent-Type:"
        " application/json\r\n"
    )
    # silent, in the middle of the head, and of the body.
    starts = ("", head, f"{head}Content-Length: 1000\r\n\r\n{{")
    attackers = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(60)]
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.2):
            for attacker in attackers[1::3] + attackers[2::3]:
                with suppress(OSError):
                    attacker.send(b"x")

    trickling = threading.Thread(target=trickle)
    try:
        for index, attacker in enumerate(attackers):
            attacker.sendall(starts[index % 3].encode())
        trickling.start()
        for _ in range(10):
            assert httpx.get(server.url + HEARTBEAT, timeout=20).status_code == 200
        answers = [parse_answer(read_all(attacker))[::2] for attacker in attackers[2::3]]
    finally:
        stop.set()
        trickling.join()
        for attacker in attackers:
            attacker.close()
    statuses = {status for status, _ in answers}
    assert 503 in statuses
    assert statuses <= {503, 400, 408}
    assert all("message" in json.loads(body) for _, body in answers)


def test_a_scrape_covers_every_process(server: RunningServer) -> None:
    before = sum_series(server.scrape(), "horde_http_requests_total", horde_route=HEARTBEAT)
    for _ in range(60):
        httpx.get(server.url + HEARTBEAT)
    scrapes = [server.scrape() for _ in range(6)]
    for scrape in scrapes:
        assert sum_series(scrape, "horde_http_requests_total", horde_route=HEARTBEAT) == before + 60
        assert (
            sum_series(scrape, "horde_http_request_seconds_count", horde_route=HEARTBEAT)
            == before + 60
        )
        assert set(re.findall(r'process="(\d+)"', scrape)) == {"0", "1"}
        assert scrape.count("# TYPE horde_http_requests_total ") == 1


def test_the_death_of_the_leader_is_followed_by_another(server: RunningServer) -> None:
    wait_until(lambda: sum_series(server.scrape(), "horde_background_leader") == 1)
    leader = find_leader(server)
    os.kill(leader, signal.SIGKILL)
    # The server replaces the process; either the new one or the old follower takes the lock that
    # the kernel freed.
    wait_until(
        lambda: (
            sum_series(server.scrape(), "horde_background_leader") == 1
            and find_leader(server) != leader
        )
    )
    wait_until(lambda: set(re.findall(r'process="(\d+)"', server.scrape())) == {"0", "1"})
    assert httpx.get(server.url + HEARTBEAT).status_code == 200


def find_leader(server: RunningServer) -> int:
    """The process id in the last event of a process that became the leader."""
    events = [json.loads(line) for line in server.log.read_text().splitlines()]
    return int(
        [
            event["pid"]
            for event in events
            if event["event"] == "horde.background.leader_changed" and event["is_leader"]
        ][-1]
    )


def test_a_request_in_flight_is_answered_before_the_end(server: RunningServer) -> None:
    body = b'{"maintenance": true}'
    head = (
        "PUT /api/v2/status/modes HTTP/1.1\r\nHost: a\r\napikey: nobody\r\nContent-Type:"
        f" application/json\r\n{CLOSE}"
    )
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        time.sleep(0.3)
        server.process.terminate()
        time.sleep(0.5)
        connection.sendall(body[5:])
        status, _, answer = parse_answer(read_all(connection))
    assert (status, json.loads(answer)["rc"]) == (401, "InvalidAPIKey")
    assert server.process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + HEARTBEAT)


def test_a_killed_master_takes_its_processes_along_and_frees_its_ports_at_once(
    migrated: dict[str, str], tmp_path: Path
) -> None:
    """A client that keeps its connection alive must not keep an orphan on the port."""
    port, metrics_port = find_free_ports(2)
    log, stopping = tmp_path / "server.log", threading.Event()
    with running_server(migrated, port, metrics_port, log) as first:
        client = threading.Thread(target=poll_over_one_connection, args=(first.url, stopping))
        client.start()
        stamps = {pid: read_start_stamp(pid) for pid in list_child_processes(first.process.pid)}
        assert len(stamps) == 2
        first.process.kill()
        first.process.wait()
        wait_until(lambda: is_port_free(port) and is_port_free(metrics_port), 3)
        try:
            with running_server(migrated, port, metrics_port, log) as second:
                assert second.process.poll() is None
            wait_until(lambda: all(read_start_stamp(pid) != stamps[pid] for pid in stamps), 10)
        finally:
            stopping.set()
            client.join()


def list_child_processes(parent: int) -> list[int]:
    """The processes that a process forked."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in children.split()]


def poll_over_one_connection(url: str, stopping: threading.Event) -> None:
    """Ask again and again as a worker does, over a connection that is kept as long as it can be."""
    with httpx.Client() as client:
        while not stopping.is_set():
            with suppress(httpx.TransportError):
                client.get(url + HEARTBEAT)
            time.sleep(0.05)
