# SPDX-License-Identifier: AGPL-3.0-or-later
"""Where the figures go: a Prometheus endpoint that covers every process of a server, and OTLP.

A server has several processes with figures of their own, and a scrape reaches one of them by
chance. So the processes share the endpoint's socket and a folder: each answers for itself on a Unix
socket there, and whichever takes a scrape asks all of them. Series carry the label `process`, a
small number that a successor takes over, so that a restarted process shows as the counter reset
which Prometheus expects. Everything starts after the fork.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, NoReturn

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from horde.config import VERSION
from horde.logger import build_failure_fields, get_logger, surviving

logger = get_logger(__name__)

OTLP_PERIOD_MILLISECONDS = 15_000
PEER_TIMEOUT_SECONDS = 1.0  # a process that is stuck is left out of a scrape
SCRAPE_TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = 1.0
PROCESS_LABEL = "process"

type Snapshot = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""Families of one process: (name, documentation, type, samples of (name, labels, value))."""


class MetricsEndpoint:
    """The address and the folder that the processes of a server share; opened before they are
    forked.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        """Listen. Raises OSError when the port is taken or the address is not of this host."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, port), family=family)
        # Every process waits on this socket; the ones that another was faster than must not hang in
        # accept.
        self.listener.setblocking(False)
        self.folder = Path(tempfile.mkdtemp(prefix="horde-metrics-"))
        self._owner = os.getpid()
        self.scrapes: ThreadingHTTPServer | None = None  # of this process

    @property
    def port(self) -> int:
        """Where it listens, also when 0 was asked for."""
        port: int = self.listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening; in the process that opened it, when the others have ended, also remove
        the folder.
        """
        if self.scrapes is not None:
            self.scrapes.shutdown()  # it would poll a closed socket without a pause
        self.listener.close()
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)


class Telemetry:
    """The running exporters of a process."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider

    def stop(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def start_telemetry(
    otlp_endpoint: str, endpoint: MetricsEndpoint | None, service_name: str
) -> Telemetry | None:
    """Start the exporters that the settings ask for in this process; None when they ask for
    none.
    """
    readers: list[MetricReader] = []
    registry = CollectorRegistry()
    if endpoint is not None:
        readers.append(
            PrometheusMetricReader(
                disable_target_info=True, scope_info_enabled=False, registry=registry
            )
        )
        ProcessCollector(registry=registry)
    if otlp_endpoint:
        exporter = OTLPMetricExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/metrics")
        readers.append(
            PeriodicExportingMetricReader(exporter, export_interval_millis=OTLP_PERIOD_MILLISECONDS)
        )
    if not readers:
        return None
    resource = Resource.create({"service.name": service_name, "service.version": VERSION})
    provider = MeterProvider(readers, resource)
    set_meter_provider(provider)
    if endpoint is not None:
        serve_metrics(endpoint, registry)
    return Telemetry(provider)


def serve_metrics(endpoint: MetricsEndpoint, registry: CollectorRegistry) -> None:
    """Answer scrapes for all processes, and the others' questions about this one, until the process
    ends.
    """
    slot, _lock = claim_slot(endpoint.folder)
    own_socket = endpoint.folder / f"{slot}.sock"
    own_socket.unlink(missing_ok=True)  # of a predecessor that was killed
    peers = socket.socket(socket.AF_UNIX)
    peers.bind(str(own_socket))
    peers.listen()
    endpoint.scrapes = server = _build_scrape_server(endpoint)
    threading.Thread(
        target=_answer_peers, args=(peers, registry, _lock), name="metrics-peers", daemon=True
    ).start()
    threading.Thread(
        target=_serve_scrapes, args=(server,), name="metrics-scrapes", daemon=True
    ).start()


def claim_slot(folder: Path) -> tuple[int, IO[bytes]]:
    """The smallest number that no living process holds, and the file whose lock says so while it is
    open.
    """
    slot = 0
    while True:
        lock = (folder / f"{slot}.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            slot += 1
            continue
        return slot, lock


def build_snapshot(families: Iterable[Metric]) -> Snapshot:
    """What a process says about itself."""
    return [
        (
            family.name,
            family.documentation,
            family.type,
            [(sample.name, sample.labels, sample.value) for sample in family.samples],
        )
        for family in families
    ]


def merge_snapshots(snapshots: dict[int, Snapshot]) -> list[Metric]:
    """One family per name over all processes, each series with the number of its process."""
    families: dict[str, Metric] = {}
    for slot, snapshot in sorted(snapshots.items()):
        for name, documentation, kind, samples in snapshot:
            family = families.setdefault(name, Metric(name, documentation, kind))
            for sample_name, labels, value in samples:
                family.add_sample(sample_name, {**labels, PROCESS_LABEL: str(slot)}, value)
    return list(families.values())


def collect_snapshots(folder: Path) -> dict[int, Snapshot]:
    """Ask every process; those that are gone or stuck are left out."""
    snapshots: dict[int, Snapshot] = {}
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError, ValueError):
            snapshots[int(path.stem)] = _ask_peer(path)
    return snapshots


def _ask_peer(path: Path) -> Snapshot:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PEER_TIMEOUT_SECONDS)
        peer.connect(str(path))
        with peer.makefile("rb") as stream:
            snapshot: Snapshot = json.load(stream)
    return snapshot


def _answer_peers(listener: socket.socket, registry: CollectorRegistry, _lock: IO[bytes]) -> None:
    """Send this process's figures to whoever connects. Holds the slot's lock for as long as it
    runs.
    """
    _repeat("metrics-peers", lambda: _answer_peer(listener, registry))


def _answer_peer(listener: socket.socket, registry: CollectorRegistry) -> None:
    peer, _ = listener.accept()
    with peer, contextlib.suppress(OSError):  # who asked is gone
        peer.settimeout(PEER_TIMEOUT_SECONDS)
        peer.sendall(json.dumps(build_snapshot(registry.collect())).encode())


def _serve_scrapes(server: ThreadingHTTPServer) -> None:
    _repeat("metrics-scrapes", server.serve_forever)


def _repeat(work: str, step: Callable[[], object]) -> NoReturn:
    """Take one step after the other for as long as the process lives, with a pause after one that
    failed.
    """
    while True:
        has_failed = True
        with surviving(work):
            step()
            has_failed = False
        if has_failed:
            time.sleep(RETRY_SECONDS)


class _MergedCollector(Collector):
    """All processes of the folder as one collector."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        return merge_snapshots(collect_snapshots(self._folder))


class _ScrapeServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what ended an answer; the library would print it with the address that asked."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):  # who asked is gone
            logger.error("horde.metrics.scrape_failed", extra=build_failure_fields(error))


def _build_scrape_server(endpoint: MetricsEndpoint) -> ThreadingHTTPServer:
    merged = CollectorRegistry()
    merged.register(_MergedCollector(endpoint.folder))

    class ScrapeHandler(BaseHTTPRequestHandler):
        timeout = SCRAPE_TIMEOUT_SECONDS

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = generate_latest(merged) if found else b"Figures are at /metrics.\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        # The name the library calls it by.
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing: a scrape every few seconds is no event."""

    server = _ScrapeServer(endpoint.listener.getsockname(), ScrapeHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = endpoint.listener
    return server
