# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a program learns that knows only the host."""

from typing import Any

from devtools.services import ServiceAddresses
from horde.config import VERSION
from tests.integration.api_horde import Api, own_api


def read(api: Api) -> Any:
    answer = api.app.test_client().get("/.well-known/serviceinfo")
    assert answer.status_code == 200
    assert answer.content_type == "application/json; charset=utf-8"
    return answer.json


def test_service_information_names_the_software_and_its_api(service_urls: ServiceAddresses) -> None:
    settings = {
        "title": "Our Horde",
        "public_url": "https://horde.example",
        "repository": "https://git.example/horde",
        "logo": "https://horde.example/logo.png",
    }
    with own_api(service_urls, "service_info", **settings) as api:
        assert read(api) == {
            "version": "0.2",
            "software": {
                "name": "Our Horde",
                "version": VERSION,
                "repository": "https://git.example/horde",
                "homepage": "https://horde.example",
                "logo": "https://horde.example/logo.png",
            },
            "api": {
                "aihorde": {
                    "name": "AI Horde API",
                    "version": "2.5",
                    "base_url": "https://horde.example",
                    "rel_url": "/api/v2",
                    "documentation": "https://horde.example/api",
                }
            },
        }


def test_without_an_address_the_one_of_the_request_is_told(service_urls: ServiceAddresses) -> None:
    with own_api(service_urls, "service_info_bare") as api:
        told = read(api)
        assert told["api"]["aihorde"]["base_url"] == "http://localhost"
        assert told["software"]["logo"] == ""
        refused = api.app.test_client().post("/.well-known/serviceinfo")
        assert (refused.status_code, list(refused.json or {})) == (405, ["message"])
