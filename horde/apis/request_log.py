# SPDX-License-Identifier: AGPL-3.0-or-later
"""One log event and two figures for each answered request."""

import logging
import time

from flask import Flask, Response, g, request

from horde import metrics
from horde.apis.node import NodeState
from horde.apis.requests import get_peer_address
from horde.logger import get_logger

logger = get_logger(__name__)

UNKNOWN_ROUTE = "unknown"
# Asked every second by whoever watches the node.
QUIET_ROUTES = frozenset({"/api/v2/status/heartbeat"})
# A method is text of the client, and an attribute must stay bounded.
KNOWN_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


def register_request_log(app: Flask, node: NodeState) -> None:
    """Watch every request of `app`; call it before the hooks that may end a request early."""

    def begin() -> None:
        g.started_at = time.monotonic()
        node.count_request(1)

    def end(_error: BaseException | None) -> None:
        if "started_at" in g:
            node.count_request(-1)

    app.before_request(begin)
    app.after_request(record_request)
    app.teardown_request(end)


def record_request(response: Response) -> Response:
    """Log and count. The route's template stands for the path: paths and queries hold ids, names
    and secrets.
    """
    seconds = time.monotonic() - g.get("started_at", time.monotonic())
    rule, method = request.url_rule, request.method
    route = UNKNOWN_ROUTE if rule is None else rule.rule
    method = method if method in KNOWN_METHODS else "other"
    metrics.http_requests.add(
        1, {"horde.method": method, "horde.route": route, "horde.status": response.status_code}
    )
    metrics.http_request_seconds.record(seconds, {"horde.method": method, "horde.route": route})
    logger.log(
        logging.DEBUG if route in QUIET_ROUTES and response.status_code == 200 else logging.INFO,
        "horde.request.answered",
        extra={
            "method": method,
            "route": route,
            "status": response.status_code,
            "milliseconds": round(seconds * 1000, 1),
            "address": get_peer_address(),
        },
    )
    return response
