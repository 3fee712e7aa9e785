# SPDX-License-Identifier: AGPL-3.0-or-later
"""GET /v2/status/heartbeat: whether this node serves, from what the node itself knows."""

from typing import cast

from flask import current_app
from flask_restx import Api, Resource

from horde.apis.node import NodeState
from horde.config import VERSION
from horde.limiter import exempt_from_limits

NODE_EXTENSION = "horde.node"


class Heartbeat(Resource):
    """Asked by load balancers every second: no key, no limit, no query."""

    @exempt_from_limits
    def get(self) -> dict[str, object]:
        """Whether this node serves.

        Always 200: `{message, version, queue, threads, active_count, db_connection}`, where
        `message` is OK, DOWN (the database did not answer last) or OVERLOADED (requests wait for a
        thread).
        """
        node = cast(NodeState, current_app.extensions[NODE_EXTENSION])
        return {
            "message": node.status,
            "version": VERSION,
            "queue": node.read_queue_length(),
            "threads": node.thread_count,
            "active_count": node.active_count,
            "db_connection": node.is_database_reachable,
        }


def register(api: Api) -> None:
    """Add the route."""
    api.add_resource(Heartbeat, "/v2/status/heartbeat")
