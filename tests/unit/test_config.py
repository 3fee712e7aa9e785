# SPDX-License-Identifier: AGPL-3.0-or-later
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import parse_url
from sqlalchemy import make_url

from horde.config import Config
from horde.front_config import FrontConfig
from horde.setting_kinds import DEVELOPMENT_SECRET, build_redis_url
from horde.settings import ConfigError

REQUIRED = {"DATABASE_URL": "postgresql://user:word@host/name", "secret_key": "salt"}


def read(**variables: str) -> Config:
    return Config.from_environment({**REQUIRED, **variables})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:word@host/name",
        "postgres://user:word@host/name",
        "postgresql+psycopg2://user:word@host/name",
    ],
)
def test_every_spelling_of_the_database_address_names_the_driver(url: str) -> None:
    assert read(DATABASE_URL=url).database_url == "postgresql+psycopg2://user:word@host/name"


def test_the_addresses_of_an_ai_horde_are_understood() -> None:
    parts = {"POSTGRES_URL": "host:5433/name", "POSTGRES_USER": "user", "POSTGRES_PASS": "word"}
    config = Config.from_environment(
        {"secret_key": "salt", **parts, "REDIS_IP": "redis", "REDIS_PORT": "6380"}
    )
    assert config.database_url == "postgresql+psycopg2://user:word@host:5433/name"
    assert config.redis_url == "redis://redis:6380"


@pytest.mark.parametrize("password", ["a/b", "a#b", "a?b", "a@b", "a%b", "a:b", " a b", "ä€", "-"])
def test_a_password_may_hold_any_character(password: str) -> None:
    config = read(
        DATABASE_URL=f"postgresql://user:{password}@host:5432/name",
        REDIS_URL=f"redis://:{password}@host:6379/3",
    )
    assert make_url(config.database_url).password == password
    assert make_url(config.database_url).host == "host"
    found = parse_url(build_redis_url(config.redis_url, 7))
    assert (found["password"], found["host"], found["db"]) == (password, "host", 7)
    front = FrontConfig.from_environment({"REDIS_URL": f"redis://:{password}@host:6379/3"})
    assert parse_url(front.redis_url or "")["password"] == password


@given(password=st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1))
def test_a_password_given_apart_is_taken_as_it_is(password: str) -> None:
    config = Config.from_environment(
        {
            "secret_key": "salt",
            "POSTGRES_URL": "host:5432/name",
            "POSTGRES_PASS": password,
            "REDIS_IP": "::1",
            "REDIS_PASSWORD": password,
        }
    )
    assert make_url(config.database_url).password == password
    assert parse_url(config.redis_url)["password"] == password


def test_a_quoted_password_is_read_as_its_characters() -> None:
    config = read(DATABASE_URL="postgresql://user:a%2Fb%25@host/name")
    assert make_url(config.database_url).password == "a/b%"


@pytest.mark.parametrize("blank", ["\n", " ", "\r\n", "\t"])
def test_blanks_around_a_value_are_dropped(blank: str) -> None:
    config = read(
        secret_key=f"{blank}salt{blank}",
        S3_ENDPOINT=f"https://store.example{blank}",
        AWS_ACCESS_KEY_ID=f"key{blank}",
        AWS_SECRET_ACCESS_KEY=f"{blank}secret",
        HORDE_PORT=f" 7001{blank}",
    )
    assert (config.secret_key, config.s3_access_key, config.s3_secret_key, config.port) == (
        "salt",
        "key",
        "secret",
        7001,
    )
    front = FrontConfig.from_environment({"HORDE_OAI_PROXY_PASSKEY": f"word{blank}"})
    assert front.proxy_passkey == "word"
    assert read(HORDE_PORT=blank).port == 7001  # counts as unset


def test_a_list_of_redis_servers_is_ignored_and_named() -> None:
    config = read(REDIS_SERVERS='["10.0.0.1"]', REDIS_URL="redis://redis")
    assert config.redis_url == "redis://redis"
    assert config.ignored_settings == ("REDIS_SERVERS",)
    assert read().ignored_settings == ()


def test_production_needs_a_secret_key() -> None:
    with pytest.raises(ConfigError, match="secret_key"):
        Config.from_environment({"DATABASE_URL": "postgresql://host/name"})
    development = {"DATABASE_URL": "postgresql://host/name", "HORDE_ENVIRONMENT": "development"}
    assert Config.from_environment(development).secret_key == DEVELOPMENT_SECRET


def test_a_database_is_needed() -> None:
    with pytest.raises(ConfigError, match="DATABASE_URL"):
        Config.from_environment({"secret_key": "salt"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HORDE_PORT", "seven"),
        ("HORDE_PORT", "99999"),
        ("HORDE_PORT", "0"),
        ("HORDE_PORT", "9" * 5000),
        ("HORDE_ENVIRONMENT", "developement"),
        ("HORDE_LISTEN", "127.0.0.1:7001"),
        ("HORDE_LISTEN", "no host"),
        ("HORDE_SERVER_THREADS", "0"),
        ("HORDE_SERVER_WORKERS", "0"),
        ("HORDE_SERVER_WORKERS", "-1"),
        ("HORDE_DEFAULT_LIMIT", "90"),
        ("HORDE_DEFAULT_LIMIT", "lots/fortnight"),
        ("HORDE_DEFAULT_LIMIT", "0/minute"),
        ("HORDE_STATUS_READ_LIMIT", "9/minute;"),
        ("HORDE_TEXT_FREE_OUTPUT_CEILING", "-1"),
        ("HORDE_TEXT_FREE_OUTPUT_FLOOR", "5000"),  # above the ceiling
        ("HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS", "1"),  # before the ceiling ends
        ("HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS", "nan"),
        ("HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS", "inf"),
        ("HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS", "1e999"),
        ("KUDOS_TRUST_THRESHOLD", "-1"),
        ("SQLALCHEMY_POOL_SIZE", "0"),
        ("SQLALCHEMY_POOL_TIMEOUT", "-30"),
        ("HORDE_LOG_FORMAT", "xml"),
        ("HORDE_LOG_LEVEL", "LOUD"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:port"),
        ("DATABASE_URL", "foo"),
        ("DATABASE_URL", "mysql://host/name"),
        ("DATABASE_URL", "postgresql://"),
        ("DATABASE_URL", "postgresql://host:99999/name"),
        ("DATABASE_URL", "postgresql://one:5432,two:5433/name"),
        ("REDIS_URL", "foo"),
        ("REDIS_URL", "redis://"),
        ("REDIS_URL", "redis://host:0"),
        ("REDIS_URL", "redis://host:6379?socket_timeout=soon"),
        ("REDIS_URL", "redis://host/one"),
        ("IP_CHECKER", "http://checker.example/"),  # nowhere to put the address
        ("HORDE_WHITELISTED_ADDRESSES", "localhost"),
        ("HORDE_VALIDATED_BACKENDS", "[" * 100_000),
        ("AWS_DEFAULT_REGION", "eu west"),
        ("R2_SOURCE_IMAGE_BUCKET", "a/b"),
        ("HORDE_TITLE", "a\x07b"),
        ("HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS", "soon"),
        ("HORDE_CHAT_ADMISSION_ENABLED", "maybe"),
        ("ADMINS", "name#1"),
        ("ADMINS", "[1]"),
        ("HORDE_TRUSTED_PROXIES", "10.0.0.0/8, proxy"),
        ("S3_ENDPOINT", "store:8333"),
        ("S3_PUBLIC_ENDPOINT", "images.example"),
        ("R2_TRANSIENT_ACCOUNT", "store"),
        ("HORDE_CHAT_MESSAGES_OFFLOAD_BYTES", "many"),
        ("HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED", "1"),  # there is nowhere to put them
    ],
)
def test_a_malformed_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} [^\n]+\.$"):
        read(**{name: value})


@pytest.mark.parametrize(
    ("value", "is_on"),
    [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False), ("", True)],
)
def test_switches(value: str, is_on: bool) -> None:
    assert read(HORDE_CHAT_ADMISSION_ENABLED=value).chat_admission_enabled is is_on


def test_the_limits_of_chat_follow_those_of_text() -> None:
    config = read(
        HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP="5/second",
        HORDE_CHAT_REQUEST_90MIN_LIMIT_PER_IP="7/minute",
    )
    assert (config.chat_request_2sec_limit, config.chat_request_90min_limit) == (
        "5/second",
        "7/minute",
    )


def test_lists_are_split_and_parsed() -> None:
    config = read(
        ADMINS='["name#1"]',
        HORDE_TRUSTED_PROXIES="10.0.0.1/8, ::1",
        HORDE_WHITELISTED_ADDRESSES=" 198.51.100.1 ,",
    )
    assert config.admins == ("name#1",)
    assert config.trusted_proxies == (ip_network("10.0.0.0/8"), ip_network("::1/128"))
    assert config.whitelisted_addresses == ("198.51.100.1",)


def test_secrets_do_not_show() -> None:
    shown = repr(
        read(REDIS_URL="redis://:word@host", AWS_ACCESS_KEY_ID="word", AWS_SECRET_ACCESS_KEY="word")
    )
    assert "word" not in shown
    assert "salt" not in shown


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_store_needs_both_its_keys(missing: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", missing: ""}
    with pytest.raises(ConfigError, match=missing):
        read(S3_ENDPOINT="https://store.example", **keys)


def test_the_settings_of_the_store() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    config = read(
        R2_TRANSIENT_ACCOUNT="https://account.example/", R2_SOURCE_IMAGE_BUCKET="images", **keys
    )
    assert (config.s3_endpoint, config.s3_region) == ("https://account.example", "auto")
    assert (config.source_image_bucket, config.chat_messages_bucket) == ("images", "images")
    config = read(
        S3_ENDPOINT="https://store.example",
        R2_CHAT_MESSAGES_BUCKET="messages",
        AWS_DEFAULT_REGION="eu",
        **keys,
    )
    assert (config.source_image_bucket, config.chat_messages_bucket) == (
        "stable-horde-source-images",
        "messages",
    )
    assert config.s3_region == "eu"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HORDE_OAI_PORT", "seven"),
        ("HORDE_OAI_PORT", "70000"),
        ("HORDE_OAI_NATIVE_URL", "horde.example"),
        ("HORDE_OAI_NATIVE_URL", "http://host:port/api"),
        ("HORDE_OAI_NATIVE_URL", "ftp://host/api"),
        ("HORDE_OAI_REDIS_URL", "host:6379"),
        ("HORDE_OAI_PROXY_PASSKEY", "line\nbreak"),
        ("HORDE_OAI_CLIENT_AGENT", "naïve"),
        ("HORDE_OAI_TRUSTED_PROXIES", "proxy"),
        ("HORDE_OAI_STREAM_BUDGET_SECONDS", "0"),
        ("HORDE_OAI_COMPLETION_BUDGET_SECONDS", "nan"),
        ("HORDE_OAI_NO_WORKER_GRACE_SECONDS", "-1"),
        ("HORDE_OAI_STREAM_OPEN_SECONDS", "inf"),
        ("HORDE_OAI_KEEPALIVE_SECONDS", "0"),
        ("HORDE_OAI_POLL_SECONDS", "0.5"),
        ("HORDE_OAI_SUBSCRIBED_POLL_SECONDS", "soon"),
        ("HORDE_OAI_SUBMIT_ATTEMPTS", "0"),
        ("HORDE_OAI_MAX_OPEN_REQUESTS", "many"),
        ("HORDE_OAI_MODELS_CACHE_SECONDS", "-1"),
        ("HORDE_OAI_CORS_ORIGINS", "https://a.example, https://b.example/"),
        ("HORDE_OAI_CORS_ORIGINS", "a.example"),
        ("HORDE_OAI_SHUTDOWN_SECONDS", "x"),
        ("HORDE_OAI_METRICS_PORT", "-1"),
        ("HORDE_LOG_LEVEL", "LOUD"),
    ],
)
def test_the_front_refuses_a_malformed_value_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FrontConfig.from_environment({name: value})


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "redis://127.0.0.1:6379/7"),
        ({"REDIS_URL": "redis://:word@host:1/0"}, "redis://:word@host:1/7"),
        ({"REDIS_IP": "host", "REDIS_PORT": "1"}, "redis://host:1/7"),
        ({"REDIS_URL": "unix:///run/redis.sock"}, "unix:///run/redis.sock?db=7"),
        (
            {"REDIS_URL": "redis://other", "HORDE_OAI_REDIS_URL": "redis://host:1"},
            "redis://host:1/7",
        ),
        ({"HORDE_OAI_REDIS_URL": "redis://host:1/3"}, "redis://host:1/3"),
        ({"HORDE_OAI_REDIS_URL": "off"}, None),
    ],
)
def test_the_front_reads_the_signals_of_the_server_s_redis(
    variables: dict[str, str], url: str | None
) -> None:
    assert FrontConfig.from_environment(variables).redis_url == url


def test_the_front_needs_no_setting_and_shows_no_secret() -> None:
    config = FrontConfig.from_environment(
        {"HORDE_OAI_PROXY_PASSKEY": "word", "REDIS_URL": "redis://:word@host"}
    )
    assert "word" not in repr(config)
    assert (FrontConfig.from_environment({}).listen, FrontConfig.from_environment({}).port) == (
        "127.0.0.1",
        7010,
    )
    assert FrontConfig.from_environment(
        {"HORDE_OAI_CORS_ORIGINS": "https://a, https://b"}
    ).cors_origins == (
        "https://a",
        "https://b",
    )
    assert (
        FrontConfig.from_environment(
            {"HORDE_OAI_NATIVE_URL": "https://horde.example/api/"}
        ).native_url
        == "https://horde.example/api"
    )
