# SPDX-License-Identifier: AGPL-3.0-or-later
"""What docker-compose.yml, the Dockerfile and .dockerignore say, without starting anything."""

import re
from dataclasses import fields
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from horde.config import Config
from horde.front_config import FrontConfig
from tests.acceptance._compose import (
    COMPOSE,
    Service,
    Unset,
    expand,
    read_instruction,
    read_services,
)
from tests.services import ROOT

NASTY = "p/a:s@s#w?o%r d\"$&'{}\\+=é"
REQUIRED = ("SECRET_KEY", "POSTGRES_PASSWORD", "REDIS_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")
SECRETS = {name: f"{name}-{NASTY}" for name in REQUIRED[:3]}
SECRETS |= {name: f"{name}-p/a:s@s#w?o%r$+=" for name in REQUIRED[3:]}  # a store's have no blanks
# Of the API: set by the file itself, or meant for development and tests alone.
NOT_PASSED = {
    "DATABASE_URL",
    "REDIS_URL",
    "REDIS_SERVERS",
    "R2_TRANSIENT_ACCOUNT",
    "AWS_DEFAULT_REGION",
    "HORDE_LISTEN",
    "HORDE_PORT",
    "HORDE_TEST_APIKEYS",
    "HORDE_TEST_RATELIMIT_DISABLED",
    "HORDE_OAI_HOST",
    "HORDE_OAI_PORT",
    "HORDE_OAI_REDIS_URL",
}


@pytest.fixture
def services() -> dict[str, Service]:
    return read_services(SECRETS)


def list_documented(section_of_front: bool) -> set[str]:
    """The settings in the tables of the reference."""
    text = (ROOT / "docs/reference/configuration.md").read_text()
    part = text.partition("\n## Front\n")[2 if section_of_front else 0]
    cells = re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(("service", "of_front"), [("api", False), ("front", True)])
def test_every_setting_of_the_reference_reaches_its_container(
    services: dict[str, Service], service: str, of_front: bool
) -> None:
    """A setting in .env that reaches no container is silently ignored."""
    passed = services[service].environment.keys()
    documented = list_documented(of_front)
    assert len(documented) > 15
    assert documented - NOT_PASSED <= passed
    common = {"OTEL_EXPORTER_OTLP_ENDPOINT", "HORDE_LOG_LEVEL", "HORDE_LOG_FORMAT"}
    assert common <= passed


def test_a_value_from_env_arrives_under_its_own_name() -> None:
    """Settings in the words an operator writes."""
    values = {
        "ADMINS": '["admin#1"]',
        "HORDE_TRUSTED_PROXIES": "172.16.0.0/12",
        "HORDE_TITLE": "A horde of ours",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    }
    config = Config.from_environment(read_services(SECRETS | values)["api"].environment)
    assert config.admins == ("admin#1",)
    assert [str(network) for network in config.trusted_proxies] == ["172.16.0.0/12"]
    assert (config.title, config.otlp_endpoint) == ("A horde of ours", "http://collector:4318")
    front = FrontConfig.from_environment(
        read_services(SECRETS | {"HORDE_OAI_CORS_ORIGINS": "https://a.example"})[
            "front"
        ].environment
    )
    assert front.cors_origins == ("https://a.example",)


def test_unset_settings_are_the_defaults(services: dict[str, Service]) -> None:
    """An empty value in a container counts as unset."""
    config = Config.from_environment(services["api"].environment)
    defaults = Config(database_url="", secret_key="")
    set_here = {
        "database_url",
        "redis_url",
        "secret_key",
        "s3_endpoint",
        "s3_access_key",
        "s3_secret_key",
        "metrics_port",
        "metrics_listen",
    }
    for field in fields(Config):
        if field.name not in set_here:
            assert getattr(config, field.name) == getattr(defaults, field.name), field.name


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_secret_stops_the_start(name: str) -> None:
    with pytest.raises(Unset, match=name):
        read_services({**SECRETS, name: ""})


def test_metrics_are_published_on_loopback_where_they_listen(services: dict[str, Service]) -> None:
    for name, variable in (("api", "HORDE_METRICS_PORT"), ("front", "HORDE_OAI_METRICS_PORT")):
        service = services[name]
        port = service.environment[variable]
        assert service.environment["HORDE_METRICS_LISTEN"] == "0.0.0.0"
        assert f"127.0.0.1:{port}:{port}" in service.raw["ports"]


def test_nothing_is_published_beyond_loopback(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.raw.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert "127.0.0.1:8333:8333" in services["store"].raw["ports"]


def test_of_the_store_only_s3_listens_beyond_its_container(services: dict[str, Service]) -> None:
    words = services["store"].command
    assert "-ip.bind=127.0.0.1" in words
    assert "-s3.ip.bind=0.0.0.0" in words
    assert not any(word.startswith(("mini", "-admin", "-webdav")) for word in words)
    reaches = {name for name, each in services.items() if "store" in each.raw["networks"]}
    assert reaches == {"store", "api"}


def test_the_database_is_asked_over_tcp_and_the_migration_waits_and_is_retried(
    services: dict[str, Service],
) -> None:
    check = services["postgres"].raw["healthcheck"]["test"]
    assert check[check.index("-h") + 1] == "127.0.0.1"
    assert "--wait" in services["migrate"].command
    assert services["migrate"].raw["restart"].startswith("on-failure")


def test_one_image_is_built_and_all_log_files_are_bounded(services: dict[str, Service]) -> None:
    ours = {name: each.raw for name, each in services.items() if each.raw["image"] == "horde:local"}
    assert ours.keys() == {"api", "front", "migrate"}
    assert [name for name, raw in ours.items() if "build" in raw] == ["migrate"]
    for service in services.values():
        assert service.raw["logging"]["options"].keys() == {"max-size", "max-file"}


def test_no_secret_stands_in_an_address() -> None:
    """A `/` in a password would end the address's host part."""
    text = COMPOSE.read_text()
    assert not re.search(r"://[^\s]*\$\{", text)


def test_neighbours_are_never_asked_through_a_proxy(services: dict[str, Service]) -> None:
    for name in ("api", "front"):
        for variable in ("NO_PROXY", "no_proxy"):
            assert {*services} - {"migrate"} <= {*services[name].environment[variable].split(",")}


def test_a_value_is_filled_in_as_compose_does() -> None:
    assert expand("${A:?} ${B:-b} ${C} ${D:-}", {"A": "$x${B}"}) == "$x${B} b  "
    with pytest.raises(Unset):
        expand("${A:?}", {"A": ""})


# The image


def list_copied() -> set[str]:
    """What the Dockerfile takes from this folder."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    return {word for words in copies if not words[0].startswith("--") for word in words}


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = [path, *(path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1))]
        if any(
            fnmatch(part, pattern) or fnmatch(part, pattern.removeprefix("**/")) for part in parts
        ):
            sent = line.startswith("!")
    return sent


def test_the_image_gets_all_it_copies_and_no_secret() -> None:
    for copied in list_copied():
        assert (ROOT / copied).exists(), copied
        assert is_sent(copied), copied
    assets = [path for path in (ROOT / "horde").rglob("*") if path.is_file()]
    kinds = {path.suffix for path in assets} - {".pyc"}
    assert {".py", ".html", ".css", ".js", ".json"} <= kinds
    for path in assets:
        relative = str(path.relative_to(ROOT))
        assert is_sent(relative) is not relative.endswith(".pyc"), relative
    for secret in (".env", ".git/config", ".dev/run/secrets.json", "tests/conftest.py"):
        assert not is_sent(secret), secret


def test_the_image_runs_every_command_as_nobody_special() -> None:
    assert read_instruction("ENTRYPOINT") == ["python", "-m", "horde.cli.main"]
    assert read_instruction("CMD")[0] == "serve"
    text = (ROOT / "Dockerfile").read_text()
    assert "USER horde" in text


def test_the_file_is_plain_yaml() -> None:
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    assert document["services"].keys() == {"api", "front", "migrate", "postgres", "redis", "store"}


def test_no_secret_stands_on_a_command_line(services: dict[str, Service]) -> None:
    """Every user of a machine can read the command lines of all."""
    words = [word for service in services.values() for word in service.command]
    assert words
    assert not [secret for secret in SECRETS.values() if any(secret in word for word in words)]
