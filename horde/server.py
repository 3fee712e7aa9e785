# SPDX-License-Identifier: AGPL-3.0-or-later
"""The API under gunicorn: processes of threads, JSON also where gunicorn itself refuses, and a
graceful end.
"""

import gc
import http
import json
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Flask
from gunicorn import util
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger as GunicornLogger
from gunicorn.http.errors import (
    ConfigurationProblem,
    ExpectationFailed,
    ForbiddenProxyRequest,
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.workers.gthread import ThreadWorker
from opentelemetry.metrics import Observation

from horde import db, metrics
from horde.actions.jobs import list_jobs
from horde.apis.v2.heartbeat import NODE_EXTENSION
from horde.app import create_app
from horde.background import start_background
from horde.clock import utcnow
from horde.config import Config
from horde.connections import BoundedSocket, ClientTooSlow, NoPlaceToWait
from horde.database.account_cache import start_account_listener
from horde.database.fitness import check_database, open_session_engine
from horde.database.kudos import get_fold_lag_seconds
from horde.database.migrate import check_secret_key, require_current_schema
from horde.exceptions import ServiceUnavailable
from horde.logger import build_failure_fields, get_logger, surviving
from horde.notices import NoticeKind, start_notices
from horde.object_deletes import count_queued_deletes
from horde.parent import end_with_parent, limit_remaining_life
from horde.telemetry import MetricsEndpoint, start_telemetry
from horde.webhooks import start_webhooks

logger = get_logger(__name__)

SERVICE_NAME = "horde-api"
# Longer than the pause between two polls of a worker, so that it keeps its connection.
KEEPALIVE_SECONDS = 15
GRACEFUL_SECONDS = 30
EXIT_SECONDS = 10  # for what stops after the last request: jobs, exporters, threads
SEND_TIMEOUT_SECONDS = 30  # without one byte taken
CONNECTIONS_PER_PROCESS = 1000

REFUSED_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (InvalidResponseHeader, 500),
    (InvalidResponseHeaderName, 500),
    (LimitRequestLine, 414),
    (LimitRequestHeaders, 431),
    (ExpectationFailed, 417),
    (UnsupportedTransferCoding, 501),
    (ForbiddenProxyRequest, 403),
    (ClientTooSlow, 408),
    (NoPlaceToWait, 503),
    (ConfigurationProblem, 500),
    (ParseException, 400),
)
"""What gunicorn raises for a request it cannot read; the first class that fits counts."""


class ServerLog(GunicornLogger):  # type: ignore[misc]
    """gunicorn's messages as events of this project. Requests are logged by `apis.request_log`."""

    def setup(self, cfg: Any) -> None:
        """Use the project's handlers instead of gunicorn's own."""
        self.error_log = logger

    def _log(self, write: Callable[..., None], message: str, arguments: tuple[object, ...]) -> None:
        write("horde.server.message", extra={"text": message % arguments if arguments else message})

    def critical(self, msg: str, *args: object, **kwargs: object) -> None:
        self._log(logger.critical, msg, args)

    def error(self, msg: str, *args: object, **kwargs: object) -> None:
        self._log(logger.error, msg, args)

    def warning(self, msg: str, *args: object, **kwargs: object) -> None:
        self._log(logger.warning, msg, args)

    def info(self, msg: str, *args: object, **kwargs: object) -> None:
        self._log(logger.info, msg, args)

    def debug(self, msg: str, *args: object, **kwargs: object) -> None:
        self._log(logger.debug, msg, args)

    def exception(self, msg: str, *args: object, **kwargs: object) -> None:
        """Only the class and the place of the error: its text may quote a request."""
        error = sys.exc_info()[1]
        logger.error(
            "horde.server.failed",
            extra={"text": msg, **(build_failure_fields(error) if error else {})},
        )


class JsonThreadWorker(ThreadWorker):  # type: ignore[misc]
    """A worker that refuses unreadable requests in JSON and says nothing of their content, in the
    answer and in the log.

    A connection gets a thread once it has sent something, and at most half of the threads wait for
    the rest of a request.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = threading.BoundedSemaphore(max(1, self.cfg.threads // 2))
        self.close_figures: Callable[[], object] = lambda: None

    def enqueue_req(self, conn: Any) -> None:
        """Hand a connection with a request to a thread; a new one has to send its first bytes
        before.
        """
        if isinstance(conn.sock, BoundedSocket):
            conn.sock.begin_request()
            super().enqueue_req(conn)
            return
        conn.sock = BoundedSocket(conn.sock, self._places)
        conn.sock.setblocking(False)
        conn.set_timeout()
        self.pending_conns.append(conn)
        self.poller.register(
            conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn)
        )

    def is_parent_alive(self) -> bool:
        """As the library's; a process without its parent also tells its clients that it ends."""
        is_alive: bool = super().is_parent_alive()
        if not is_alive:
            self.alive = False
        return is_alive

    def _cap_keepalive(self, deadline: float) -> None:
        """At the end of the process: it listens no more, and does not wait for connections that
        never sent anything.

        A listener that stays open while the last requests are answered would let clients in whom
        nobody serves. The port of a killed server is free for its successor at once.
        """
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, deadline)
        for listener in self.sockets:
            listener.close()
        if not self.is_parent_alive():
            self.close_figures()
            limit_remaining_life(GRACEFUL_SECONDS + EXIT_SECONDS)

    def handle_error(
        self, req: object, client: socket.socket, addr: object, exc: Exception
    ) -> None:
        """Answer and count a request that never reached the application, or whose answer broke
        off.
        """
        status = next((status for kind, status in REFUSED_STATUSES if isinstance(exc, kind)), 500)
        fields = {"status": status, "error_class": type(exc).__name__}
        if status >= 500:
            logger.error("horde.server.request_failed", extra=fields | build_failure_fields(exc))
        else:
            logger.info("horde.server.request_refused", extra=fields)
        metrics.http_requests.add(
            1, {"horde.method": "other", "horde.route": "unknown", "horde.status": status}
        )
        try:
            util.write_nonblock(client, build_refusal(status))
        except OSError:
            logger.debug("horde.server.client_gone")


class TranslatedBody:
    """A request body whose malformed chunks and stalls are an OSError, which Flask takes for a
    client that broke off: a 400.

    A body there is no place to wait for is refused with a 503.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """As the stream's."""
        try:
            data: bytes = self._stream.read(size)
        except NoPlaceToWait as error:
            raise ServiceUnavailable(
                "Too many requests are arriving slowly. Please send this one again."
            ) from error
        except (ParseException, ClientTooSlow) as error:
            raise OSError("The body is malformed or does not arrive.") from error
        return data


def build_refusal(status: int) -> bytes:
    """A whole HTTP answer `{"message": ...}` that closes the connection."""
    reason = http.HTTPStatus(status).phrase
    body = json.dumps({"message": reason}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\n"
        "Connection: close\r\n"
        "Content-Type: application/json; charset=utf-8\r\n"
        "Access-Control-Allow-Origin: *\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class HordeServer(BaseApplication):  # type: ignore[misc]
    """gunicorn's processes around `create_app`. `run` returns by SystemExit, in the parent and in
    each process.
    """

    def __init__(self, config: Config, endpoint: MetricsEndpoint | None) -> None:
        self._config, self._endpoint = config, endpoint
        # Of this process, last started first stopped.
        self._stop_calls: list[Callable[[], object]] = []
        super().__init__()

    def load_config(self) -> None:
        """gunicorn's settings; nothing is read from files, the command line or the environment."""
        address = f"[{self._config.listen}]" if ":" in self._config.listen else self._config.listen
        settings: dict[str, object] = {
            "bind": f"{address}:{self._config.port}",
            "workers": self._config.server_workers,
            "threads": self._config.server_threads,
            "worker_class": JsonThreadWorker,
            "worker_connections": CONNECTIONS_PER_PROCESS,
            "keepalive": KEEPALIVE_SECONDS,
            "graceful_timeout": GRACEFUL_SECONDS,
            "logger_class": ServerLog,
            "control_socket_disable": True,  # it has one fixed path, where two servers collide
            "forwarded_allow_ips": "",  # addresses are judged by `apis.requests` alone
            "proc_name": SERVICE_NAME,
            "when_ready": bound_socket_waits,
            "post_fork": self.start_process,
            "post_worker_init": self.start_threads,
            "worker_exit": self.stop_process,
        }
        for name, value in settings.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        """The application, made in each process: connections do not survive a fork."""
        app = create_app(self._config)
        application = app.wsgi_app

        def with_translated_body(environ: dict[str, Any], start_response: Any) -> Any:
            return application(
                environ | {"wsgi.input": TranslatedBody(environ["wsgi.input"])}, start_response
            )

        app.wsgi_app = with_translated_body  # type: ignore[method-assign]
        return app

    def start_process(self, _arbiter: object, worker: JsonThreadWorker) -> None:
        """Right after the fork: the tie to the parent, and the exporters, as they run threads."""
        end_with_parent(signal.SIGTERM)
        if self._endpoint is not None:
            worker.close_figures = self._endpoint.close
        with surviving("telemetry"):  # the API runs without them too
            telemetry = start_telemetry(self._config.otlp_endpoint, self._endpoint, SERVICE_NAME)
            self._stop_calls += [] if telemetry is None else [telemetry.stop]

    def start_threads(self, worker: JsonThreadWorker) -> None:
        """Once the application is made: the periodic jobs, the webhooks, the news about accounts,
        and the queue's figure.
        """
        freeze_objects()
        worker.wsgi.extensions[NODE_EXTENSION].read_queue_length = worker.tpool._work_queue.qsize
        stop_listening = threading.Event()
        start_account_listener(stop_listening)
        self._stop_calls.append(stop_listening.set)
        self._stop_calls.append(start_webhooks().stop)
        notices = start_notices(
            {
                NoticeKind.PAUSED_WORKER: self._config.paused_notice_webhook,
                NoticeKind.PROBLEM_USER: self._config.problem_user_webhook,
            }
        )
        self._stop_calls.append(notices.stop)
        background = start_background(self._config, list_jobs(self._config))
        self._stop_calls.append(background.stop)
        metrics.set_gauge_source(
            "horde.store.waiting_deletes",
            lambda: observe_waiting_deletes() if background.is_leader else [],
        )
        metrics.set_gauge_source(
            "horde.kudos.fold_lag_seconds",
            lambda: observe_fold_lag() if background.is_leader else [],
        )

    def stop_process(self, _arbiter: object, _worker: object) -> None:
        """After the last request of this process."""
        while self._stop_calls:
            with surviving("stop"):
                self._stop_calls.pop()()


def observe_fold_lag() -> list[Observation]:
    """How far the balances lag; nothing while the database is away."""
    try:
        with db.reading() as session:
            return [Observation(get_fold_lag_seconds(session, utcnow()))]
    except ServiceUnavailable:
        return []


def observe_waiting_deletes() -> list[Observation]:
    """How many stored objects wait for another try; nothing while Redis is away."""
    count = count_queued_deletes()
    return [] if count is None else [Observation(count)]


def freeze_objects() -> None:
    """Keep what the libraries and the application made out of every later collection, that at the
    end included.

    They are hundreds of thousands of objects that live as long as the process: walking them makes
    each full collection a pause, and a stop a second longer.
    """
    gc.collect()
    gc.freeze()


def bound_socket_waits(arbiter: Any) -> None:
    """Let no client hold a thread by taking nothing; accepted connections inherit it from the
    listener.
    """
    for listener in arbiter.LISTENERS:
        listener.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_SECONDS, 0)
        )


def check_start(config: Config) -> None:
    """Raise before a process is started: DatabaseUnfit, SchemaError, ConfigError for another
    secret_key than the database's, a driver's error when there is no database.
    """
    check_database(config)
    with open_session_engine(config) as engine:
        require_current_schema(engine)
        check_secret_key(engine, config.secret_key)


def serve(config: Config) -> None:
    """Serve until a signal ends it. Raises what `check_start` raises, and OSError for a metrics
    port that is taken.
    """
    for name in config.ignored_settings:
        logger.warning("horde.config.ignored", extra={"setting": name})
    if not config.s3_endpoint:
        # Requests with images are refused, and nothing else.
        logger.warning("horde.store.not_configured")
    check_start(config)
    freeze_objects()  # before the processes are forked, which then share the pages
    endpoint = (
        MetricsEndpoint(config.metrics_port, config.metrics_listen) if config.metrics_port else None
    )
    try:
        HordeServer(config, endpoint).run()
    finally:
        if endpoint is not None:
            endpoint.close()
