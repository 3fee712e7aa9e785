# SPDX-License-Identifier: AGPL-3.0-or-later
"""The front under uvicorn: one process, one loop, and an end that lets running completions finish.

Source: docs/reference/chat_front.md, "Shutdown".
"""

import asyncio
import signal
import socket
from types import FrameType
from typing import Final

import uvicorn

from horde.front_config import FrontConfig
from horde.logger import get_logger
from horde.oai.app import create_front_app
from horde.oai.connection import FrontConnection
from horde.telemetry import MetricsEndpoint, start_telemetry

logger = get_logger(__name__)

SERVICE_NAME: Final = "horde-oai-front"
KEEPALIVE_SECONDS: Final = 15
# For native cancels and error events, once the time for running completions is over.
LAST_WORDS_SECONDS: Final = 10


class FrontServer(uvicorn.Server):
    """uvicorn that tells the open completions when their time is over, and ends with 0."""

    def __init__(self, config: FrontConfig) -> None:
        app = create_front_app(config)
        self._calls, self._pops = app.state.calls, app.state.pops
        self._shutdown_seconds = config.shutdown_seconds
        super().__init__(
            uvicorn.Config(
                app,
                host=config.listen,
                port=config.port,
                lifespan="on",
                http=FrontConnection,
                ws="none",
                log_config=None,  # the project's own handlers stay
                access_log=False,  # paths of unknown routes are text of clients
                proxy_headers=False,  # which address is believed is a setting of the front
                server_header=False,
                timeout_keep_alive=KEEPALIVE_SECONDS,
                timeout_graceful_shutdown=round(config.shutdown_seconds) + LAST_WORDS_SECONDS,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end; a second interrupt does not wait."""
        # Not remembered as the library does, which would raise the signal again after a graceful
        # end.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, let running completions go on for a while, then end them."""
        logger.info("horde.oai.shutting_down")
        self._pops.shut_down()
        timer = asyncio.get_running_loop().call_later(self._shutdown_seconds, self._calls.shut_down)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve_front(config: FrontConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError when the address cannot be used."""
    endpoint = (
        MetricsEndpoint(config.metrics_port, config.metrics_listen) if config.metrics_port else None
    )
    telemetry = start_telemetry(config.otlp_endpoint, endpoint, SERVICE_NAME)
    try:
        # Bound here, since the library logs a failure and exits by itself.
        with socket.create_server(
            (config.listen, config.port), family=_get_family(config.listen), backlog=2048
        ) as listener:
            logger.info(
                "horde.oai.started",
                extra={"address": config.listen, "port": listener.getsockname()[1]},
            )
            FrontServer(config).run(sockets=[listener])
    finally:
        if telemetry is not None:
            telemetry.stop()
        if endpoint is not None:
            endpoint.close()


def _get_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
