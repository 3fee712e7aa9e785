# SPDX-License-Identifier: AGPL-3.0-or-later
"""The whole API of an application of a test module's own, asked as clients ask it."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from flask import Flask
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde.app import RESOURCE_MODULES
from horde.classes.base.user import User, UserRoleTypes
from horde.clock import utcnow
from horde.db import transaction
from tests.integration.rows import make_user, own_horde


class Api:
    """Calls of routes under /api/v2; `Any` is the response, whose body a test may look into."""

    def __init__(self, app: Flask) -> None:
        self.app = app

    def call(
        self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str
    ) -> Any:
        sent = headers if key is None else {"apikey": key, **headers}
        address = sent.pop("address", "127.0.0.1")
        options: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            options = {"data": body, "content_type": "application/json"}
        return self.app.test_client().open(
            f"/api/v2{path}",
            method=method,
            headers=sent,
            environ_base={"REMOTE_ADDR": address},
            **options,
        )

    def get(self, path: str, key: str | None = None, **headers: str) -> Any:
        return self.call("GET", path, key, **headers)

    def put(self, path: str, body: Any, key: str | None, **headers: str) -> Any:
        return self.call("PUT", path, key, body, **headers)

    def post(self, path: str, body: Any, key: str | None, **headers: str) -> Any:
        return self.call("POST", path, key, body, **headers)

    def patch(self, path: str, body: Any, key: str | None, **headers: str) -> Any:
        return self.call("PATCH", path, key, body, **headers)

    def delete(self, path: str, key: str | None, body: Any = None, **headers: str) -> Any:
        return self.call("DELETE", path, key, body, **headers)

    def list_acts(self, key: str, **query: Any) -> list[dict[str, Any]]:
        """What moderators did, newest first."""
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        answer = self.get(f"/operations/moderator_acts?{asked}", key)
        assert answer.status_code == 200, answer.json
        return list(answer.json)


@contextmanager
def own_api(service_urls: ServiceAddresses, name: str, **settings: Any) -> Iterator[Api]:
    """The whole API on a database of its own."""
    with own_horde(service_urls, name, RESOURCE_MODULES, **settings) as app:
        yield Api(app)


def make_moderator() -> tuple[int, str]:
    """The id and the key of a new moderator."""
    return make_user(UserRoleTypes.MODERATOR, UserRoleTypes.TRUSTED)


def let_rest(user_id: int, days: float) -> None:
    """Let an account have done nothing for so long."""
    with transaction() as session:
        session.execute(
            update(User)
            .where(User.id == user_id)
            .values(last_active=utcnow() - timedelta(days=days))
        )
