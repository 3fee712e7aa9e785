# SPDX-License-Identifier: AGPL-3.0-or-later
"""`/.well-known/serviceinfo`: what runs here, for programs that know only a host's name.

Source: docs/reference/status.md, "Service information".
"""

from flask import current_app, request
from flask.views import MethodView
from flask_restx import Api

from horde.apis.requests import get_config
from horde.config import VERSION
from horde.json_text import JsonObject

FORMAT_VERSION = "0.2"
API_VERSION = "2.5"  # of the wire, as clients of an AI Horde compare it


class ServiceInfo(MethodView):
    """The software, and where its API is."""

    def get(self) -> JsonObject:
        """The document; addresses are those of `HORDE_URL`, else of the request."""
        config = get_config()
        base_url = config.public_url or request.host_url.rstrip("/")
        return {
            "version": FORMAT_VERSION,
            "software": {
                "name": config.title,
                "version": VERSION,
                "repository": config.repository,
                "homepage": base_url,
                "logo": config.logo,
            },
            "api": {
                "aihorde": {
                    "name": "AI Horde API",
                    "version": API_VERSION,
                    "base_url": base_url,
                    "rel_url": "/api/v2",
                    "documentation": f"{base_url}/api",
                }
            },
        }


def register(api: Api) -> None:
    """Add the document to the application of the API."""
    app = api.app or current_app
    app.add_url_rule("/.well-known/serviceinfo", view_func=ServiceInfo.as_view("serviceinfo"))
