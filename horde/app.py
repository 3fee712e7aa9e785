# SPDX-License-Identifier: AGPL-3.0-or-later
"""create_app: the only place where the parts of the API are joined."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType

from flask import Flask, Request
from opentelemetry.metrics import Observation
from sqlalchemy.pool import QueuePool
from werkzeug.routing import MapAdapter

from horde import db, image, metrics, r2, redis_ctrl
from horde.apis import dashboard, register, service_info, site
from horde.apis.document import DocumentedApi
from horde.apis.errors import register_error_handlers
from horde.apis.node import NodeState
from horde.apis.request_log import register_request_log
from horde.apis.requests import (
    CONFIG_EXTENSION,
    RESOLVER_EXTENSION,
    ResolveClientAddress,
    check_storable_request,
    get_client_address,
)
from horde.apis.responses import (
    answer_preflight,
    register_response_hooks,
    write_json_with_standard_library,
)
from horde.apis.v2 import (
    base,
    documents,
    evidence,
    filters,
    heartbeat,
    kobold,
    kudos,
    operations,
    sharedkeys,
    stats,
    styles,
    teams,
    worker_messages,
    workers,
)
from horde.apis.v2 import users as user_routes
from horde.config import VERSION, Config
from horde.database import passkeys, users
from horde.limiter import init_limiter
from horde.runtime import in_this_runtime

RESOURCE_MODULES: tuple[ModuleType, ...] = (
    heartbeat,
    base,
    workers,
    worker_messages,
    teams,
    styles,
    kobold,
    user_routes,
    sharedkeys,
    kudos,
    filters,
    operations,
    evidence,
    stats,
    documents,
    site,
    service_info,
    dashboard,
    register,
)
"""Modules with a `register(api)` that adds their routes."""


class HordeFlask(Flask):
    """Flask without its own log of exceptions: they may quote prompts and keys, so `apis.errors`
    writes its own.
    """

    def log_exception(
        self, exc_info: tuple[type, BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> None:
        """Nothing: called by restx for every 5xx, refusals such as 503 included."""

    def ensure_sync[**P, R](self, func: Callable[P, R]) -> Callable[P, R]:
        """The function itself. No view or hook here is a coroutine, and Flask would ask each of
        them at each request.
        """
        return func

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        """As Flask's, for a horde on one host: it would look twice at the name that it is called
        by, and take it apart. Raises SecurityError for a name that is none.
        """
        if request is None or "HTTP_UPGRADE" in request.environ:
            return super().create_url_adapter(request)
        environ = request.environ
        return self.url_map.bind(
            request.host,
            environ.get("SCRIPT_NAME", ""),
            "",
            environ["wsgi.url_scheme"],
            environ["REQUEST_METHOD"],
            decode_wsgi_text(environ.get("PATH_INFO", "")),
            query_args=decode_wsgi_text(environ.get("QUERY_STRING", "")),
        )


def decode_wsgi_text(text: str) -> str:
    """What stands in a WSGI environment as Latin-1, as the UTF-8 it came as."""
    return text if text.isascii() else text.encode("latin1").decode(errors="replace")


def create_app(
    config: Config,
    *,
    resource_modules: tuple[ModuleType, ...] = RESOURCE_MODULES,
    resolve_client_address: ResolveClientAddress = passkeys.resolve_client_address,
) -> Flask:
    """The API application. Connects to the database and Redis lazily: nothing is asked before the
    first request.
    """
    app = HordeFlask("horde", static_folder=None, template_folder="apis/templates")
    app.config.update(
        RESTX_ERROR_404_HELP=False,  # it would list routes in every 404
        RESTX_MASK_SWAGGER=False,  # X-Fields works on every route and is told once
    )
    app.url_map.merge_slashes = False  # else `//` is a redirect, and clients lose their body on it
    app.url_map.strict_slashes = False
    app.url_map.redirect_defaults = False

    node = NodeState(config.server_threads)
    app.extensions[CONFIG_EXTENSION] = config
    app.extensions[RESOLVER_EXTENSION] = resolve_client_address
    app.extensions[heartbeat.NODE_EXTENSION] = node

    engine = db.connect(config, answer_seconds=config.database_answer_seconds)
    db.watch_connections(engine, node.note_database)
    metrics.set_gauge_source("horde.db.pool_connections", lambda: observe_pool(engine.pool))
    redis_ctrl.connect(config)
    r2.connect(config)
    image.configure(server_threads=config.server_threads)
    users.configure(config)

    api = DocumentedApi(
        app,
        version=VERSION,
        title=f"{config.title} API",
        description="X-Fields narrows any answer to the fields it lists.",
        prefix="/api",
        doc="/api/",
        default="node",
        default_label="The node that answers.",
        contact_email=config.contact_email or None,
    )
    write_json_with_standard_library(api)
    register_error_handlers(app, api)
    register_request_log(app, node)
    app.before_request(answer_preflight)
    app.before_request(check_storable_request)
    init_limiter(app, config, get_client_address)
    app.wsgi_app = in_this_runtime(app.wsgi_app)  # type: ignore[method-assign]
    register_response_hooks(app, config)
    for module in resource_modules:
        module.register(api)
    if config.oidc_issuer:
        # By name, as commands are: its libraries are loaded where they are of use.
        import_module("horde.apis.sign_in").install(app, config)
    return app


def observe_pool(pool: object) -> list[Observation]:
    """Connections in use and idle."""
    if not isinstance(pool, QueuePool):
        return []
    return [
        Observation(pool.checkedout(), {"horde.state": "in_use"}),
        Observation(pool.checkedin(), {"horde.state": "idle"}),
    ]
