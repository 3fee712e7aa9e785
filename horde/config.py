# SPDX-License-Identifier: AGPL-3.0-or-later
"""The settings of a process: read once from the environment, typed, frozen. Nothing else reads the
environment.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Self
from urllib.parse import urlsplit, urlunsplit

type Network = IPv4Network | IPv6Network

VERSION = "5.1.15"  # of the API and its schema; a test holds it to pyproject.toml
# Keys made with it are worthless: development data is thrown away.
DEVELOPMENT_SECRET = "development-only-secret"
CHAT_SIGNAL_DATABASE = 7  # of Redis: completion events, stream leases and streams
DEFAULT_VALIDATED_BACKENDS = (
    "AI Horde Worker",
    "AI Horde Worker~aphrodite~oai",
    "AI Horde Worker~aphrodite~kai",
    "KoboldCppEmbedWorker",
    "TabbyAPI",
    "Horde Bridge",  # our own reference worker: without it, it would earn 0.3 of a validated one
)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# An AI Horde mirrors its caches to a list of servers; here one address serves all.
IGNORED_SETTINGS = ("REDIS_SERVERS",)


class ConfigError(Exception):
    """A setting is missing or cannot be read; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of the API and its commands. Field comments name the environment variable."""

    development: bool = False  # HORDE_ENVIRONMENT=development
    # services
    # DATABASE_URL, else POSTGRES_URL, POSTGRES_USER, POSTGRES_PASS.
    database_url: str = field(repr=False)
    # REDIS_URL, else REDIS_IP, REDIS_PORT.
    redis_url: str = field(default="redis://127.0.0.1:6379", repr=False)
    ignored_settings: tuple[str, ...] = ()  # of IGNORED_SETTINGS, those that are set
    s3_endpoint: str = ""  # S3_ENDPOINT, else R2_TRANSIENT_ACCOUNT
    s3_access_key: str = field(default="", repr=False)  # AWS_ACCESS_KEY_ID
    s3_secret_key: str = field(default="", repr=False)  # AWS_SECRET_ACCESS_KEY
    s3_region: str = "auto"  # AWS_DEFAULT_REGION
    # S3_PUBLIC_ENDPOINT, where workers reach the store; empty is s3_endpoint.
    s3_public_endpoint: str = ""
    source_image_bucket: str = "stable-horde-source-images"  # R2_SOURCE_IMAGE_BUCKET
    # R2_CHAT_MESSAGES_BUCKET, that of the images when unset.
    chat_messages_bucket: str = "stable-horde-source-images"
    db_pool_size: int = 15  # SQLALCHEMY_POOL_SIZE, connections a process keeps
    db_max_overflow: int = 5  # SQLALCHEMY_MAX_OVERFLOW
    db_pool_timeout_seconds: float = 30.0  # SQLALCHEMY_POOL_TIMEOUT
    # server
    listen: str = "127.0.0.1"  # HORDE_LISTEN
    port: int = 7001  # HORDE_PORT
    server_workers: int = 2  # HORDE_SERVER_WORKERS, gunicorn processes
    server_threads: int = 16  # HORDE_SERVER_THREADS, threads of each process
    metrics_port: int = 0  # HORDE_METRICS_PORT, Prometheus endpoint on loopback; 0 is off
    otlp_endpoint: str = ""  # OTEL_EXPORTER_OTLP_ENDPOINT
    log_level: str = "INFO"  # HORDE_LOG_LEVEL
    log_json: bool = True  # HORDE_LOG_FORMAT=json|text; text is the default in development
    # accounts
    # secret_key: salt of stored keys; must never change once keys exist.
    secret_key: str = field(repr=False)
    admins: tuple[str, ...] = ()  # ADMINS, a JSON array of name#id
    # KUDOS_TRUST_THRESHOLD, escrow for promotion; unset is off.
    kudos_trust_threshold: int | None = None
    test_apikeys: bool = False  # HORDE_TEST_APIKEYS
    # addresses and limits
    # HORDE_TRUSTED_PROXIES, networks whose X-Forwarded-For is believed.
    trusted_proxies: tuple[Network, ...] = ()
    whitelisted_addresses: tuple[str, ...] = ()  # HORDE_WHITELISTED_ADDRESSES
    rate_limits_enabled: bool = True  # HORDE_TEST_RATELIMIT_DISABLED turns them off
    default_limit: str = "90/minute"  # HORDE_DEFAULT_LIMIT
    text_request_2sec_limit: str = "2/second"  # HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP
    text_request_90min_limit: str = "90/minute"  # HORDE_TEXT_REQUEST_90MIN_LIMIT_PER_IP
    # HORDE_CHAT_REQUEST_2SEC_LIMIT_PER_IP, follows text when unset.
    chat_request_2sec_limit: str = "2/second"
    # HORDE_CHAT_REQUEST_90MIN_LIMIT_PER_IP, follows text when unset.
    chat_request_90min_limit: str = "90/minute"
    status_read_limit: str = "600/minute"  # HORDE_STATUS_READ_LIMIT
    status_delete_limit: str = "60/minute"  # HORDE_STATUS_DELETE_LIMIT
    ip_checker: str = ""  # IP_CHECKER, address of the checker with {ip} in it
    ip_checker_no_data: str = ""  # IP_CHECKER_LC
    # text and chat
    # HORDE_VALIDATED_BACKENDS, a JSON array.
    validated_backends: tuple[str, ...] = DEFAULT_VALIDATED_BACKENDS
    # HORDE_IMAGE_LLM_REFERENCE, URL or path; empty keeps the bundled list.
    text_model_reference: str = ""
    upfront_kudos_on_workerlist: bool = False  # HORDE_UPFRONT_KUDOS_ON_WORKERLIST
    require_matched_targeting: bool = False  # HORDE_REQUIRE_MATCHED_TARGETING
    free_output_ceiling: int = 4096  # HORDE_TEXT_FREE_OUTPUT_CEILING, tokens
    free_output_floor: int = 512  # HORDE_TEXT_FREE_OUTPUT_FLOOR, tokens
    free_output_wait_full_seconds: float = 60.0  # HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS
    free_output_wait_floor_seconds: float = 300.0  # HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS
    chat_admission_enabled: bool = True  # HORDE_CHAT_ADMISSION_ENABLED
    chat_messages_offload_enabled: bool = False  # HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED
    # HORDE_CHAT_MESSAGES_OFFLOAD_BYTES, the largest messages that stay inline.
    chat_messages_offload_bytes: int = 262144
    chat_messages_offload_gzip: bool = False  # HORDE_CHAT_MESSAGES_OFFLOAD_GZIP
    # names shown to people
    title: str = "Horde"  # HORDE_TITLE
    contact_email: str = ""  # HORDE_EMAIL

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read a configuration; raises ConfigError naming the variable that is missing or
        malformed.
        """
        read = _Reader(environment)
        development = read.text("HORDE_ENVIRONMENT", "production") == "development"
        secret_key = read.text("secret_key", DEVELOPMENT_SECRET if development else "")
        if not secret_key:
            raise ConfigError(
                "secret_key is not set: it salts every stored key, so there is no default in production."
            )
        text_2sec = read.text("HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP", "2/second")
        text_90min = read.text("HORDE_TEXT_REQUEST_90MIN_LIMIT_PER_IP", "90/minute")
        s3_endpoint = _s3_endpoint(read)
        source_image_bucket = read.text("R2_SOURCE_IMAGE_BUCKET", "stable-horde-source-images")
        offload_enabled = read.flag("HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED", default=False)
        if offload_enabled and not s3_endpoint:
            raise ConfigError(
                "HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED is on, and without S3_ENDPOINT there is nowhere to put them."
            )
        return cls(
            development=development,
            database_url=_database_url(read),
            redis_url=_redis_url(read),
            ignored_settings=tuple(name for name in IGNORED_SETTINGS if read.text(name, "")),
            s3_endpoint=s3_endpoint,
            s3_access_key=read.text("AWS_ACCESS_KEY_ID", ""),
            s3_secret_key=read.text("AWS_SECRET_ACCESS_KEY", ""),
            s3_region=read.text("AWS_DEFAULT_REGION", "auto"),
            s3_public_endpoint=_s3_address(read, "S3_PUBLIC_ENDPOINT"),
            source_image_bucket=source_image_bucket,
            chat_messages_bucket=read.text("R2_CHAT_MESSAGES_BUCKET", source_image_bucket),
            db_pool_size=read.number("SQLALCHEMY_POOL_SIZE", 15, int),
            db_max_overflow=read.number("SQLALCHEMY_MAX_OVERFLOW", 5, int),
            db_pool_timeout_seconds=read.number("SQLALCHEMY_POOL_TIMEOUT", 30.0, float),
            listen=read.text("HORDE_LISTEN", "127.0.0.1"),
            port=read.number("HORDE_PORT", 7001, int),
            server_workers=read.number("HORDE_SERVER_WORKERS", 2, int),
            server_threads=read.number("HORDE_SERVER_THREADS", 16, int),
            metrics_port=read.number("HORDE_METRICS_PORT", 0, int),
            otlp_endpoint=read.text("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
            log_level=read.log_level("HORDE_LOG_LEVEL"),
            log_json=read.text("HORDE_LOG_FORMAT", "text" if development else "json") == "json",
            secret_key=secret_key,
            admins=read.text_list("ADMINS"),
            kudos_trust_threshold=read.optional_number("KUDOS_TRUST_THRESHOLD"),
            test_apikeys=read.flag("HORDE_TEST_APIKEYS", default=False),
            trusted_proxies=read.networks("HORDE_TRUSTED_PROXIES"),
            whitelisted_addresses=read.words("HORDE_WHITELISTED_ADDRESSES"),
            rate_limits_enabled=not read.flag("HORDE_TEST_RATELIMIT_DISABLED", default=False),
            default_limit=read.text("HORDE_DEFAULT_LIMIT", "90/minute"),
            text_request_2sec_limit=text_2sec,
            text_request_90min_limit=text_90min,
            chat_request_2sec_limit=read.text("HORDE_CHAT_REQUEST_2SEC_LIMIT_PER_IP", text_2sec),
            chat_request_90min_limit=read.text("HORDE_CHAT_REQUEST_90MIN_LIMIT_PER_IP", text_90min),
            status_read_limit=read.text("HORDE_STATUS_READ_LIMIT", "600/minute"),
            status_delete_limit=read.text("HORDE_STATUS_DELETE_LIMIT", "60/minute"),
            ip_checker=read.text("IP_CHECKER", ""),
            ip_checker_no_data=read.text("IP_CHECKER_LC", ""),
            validated_backends=read.text_list("HORDE_VALIDATED_BACKENDS")
            or DEFAULT_VALIDATED_BACKENDS,
            text_model_reference=read.text("HORDE_IMAGE_LLM_REFERENCE", ""),
            upfront_kudos_on_workerlist=read.flag(
                "HORDE_UPFRONT_KUDOS_ON_WORKERLIST", default=False
            ),
            require_matched_targeting=read.flag("HORDE_REQUIRE_MATCHED_TARGETING", default=False),
            free_output_ceiling=read.number("HORDE_TEXT_FREE_OUTPUT_CEILING", 4096, int),
            free_output_floor=read.number("HORDE_TEXT_FREE_OUTPUT_FLOOR", 512, int),
            free_output_wait_full_seconds=read.number(
                "HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS", 60.0, float
            ),
            free_output_wait_floor_seconds=read.number(
                "HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS", 300.0, float
            ),
            chat_admission_enabled=read.flag("HORDE_CHAT_ADMISSION_ENABLED", default=True),
            chat_messages_offload_enabled=offload_enabled,
            chat_messages_offload_bytes=read.number(
                "HORDE_CHAT_MESSAGES_OFFLOAD_BYTES", 262144, int
            ),
            chat_messages_offload_gzip=read.flag("HORDE_CHAT_MESSAGES_OFFLOAD_GZIP", default=False),
            title=read.text("HORDE_TITLE", "Horde"),
            contact_email=read.text("HORDE_EMAIL", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Every setting of the OpenAI-compatible front, which has no database and no secret of its
    own.
    """

    listen: str = "127.0.0.1"  # HORDE_OAI_HOST
    port: int = 7010  # HORDE_OAI_PORT
    native_url: str = "http://127.0.0.1:7001/api"  # HORDE_OAI_NATIVE_URL, without /v2
    # HORDE_OAI_REDIS_URL; None polls only.
    redis_url: str | None = field(default="redis://127.0.0.1:6379/7", repr=False)
    # HORDE_OAI_PROXY_PASSKEY, of the front's service account.
    proxy_passkey: str = field(default="", repr=False)
    # HORDE_OAI_TRUSTED_PROXIES, networks whose X-Forwarded-For is believed.
    trusted_proxies: tuple[Network, ...] = ()
    # HORDE_OAI_CLIENT_AGENT, for clients that send none.
    client_agent: str = "aihorde-oai-front:1:unknown"
    stream_budget_seconds: float = 600.0  # HORDE_OAI_STREAM_BUDGET_SECONDS
    # HORDE_OAI_COMPLETION_BUDGET_SECONDS, below the 600 s of OpenAI's SDKs.
    completion_budget_seconds: float = 540.0
    no_worker_grace_seconds: float = 60.0  # HORDE_OAI_NO_WORKER_GRACE_SECONDS
    stream_open_seconds: float = 10.0  # HORDE_OAI_STREAM_OPEN_SECONDS
    keepalive_seconds: float = 15.0  # HORDE_OAI_KEEPALIVE_SECONDS
    poll_seconds: float = 2.0  # HORDE_OAI_POLL_SECONDS, without a subscription
    subscribed_poll_seconds: float = 10.0  # HORDE_OAI_SUBSCRIBED_POLL_SECONDS, with one
    submit_attempts: int = 3  # HORDE_OAI_SUBMIT_ATTEMPTS
    max_open_requests: int = 1000  # HORDE_OAI_MAX_OPEN_REQUESTS, completions open at once
    models_cache_seconds: float = 5.0  # HORDE_OAI_MODELS_CACHE_SECONDS
    cors_origins: tuple[str, ...] = ("*",)  # HORDE_OAI_CORS_ORIGINS
    # HORDE_OAI_SHUTDOWN_SECONDS, for what runs when the process is told to end.
    shutdown_seconds: float = 30.0
    metrics_port: int = 0  # HORDE_OAI_METRICS_PORT, Prometheus endpoint on loopback; 0 is off
    otlp_endpoint: str = ""  # OTEL_EXPORTER_OTLP_ENDPOINT
    log_level: str = "INFO"  # HORDE_LOG_LEVEL
    log_json: bool = True  # HORDE_LOG_FORMAT=json|text; text is the default in development

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read a configuration; raises ConfigError naming the variable that cannot be read."""
        read = _Reader(environment)
        development = read.text("HORDE_ENVIRONMENT", "production") == "development"
        day = 86_400.0
        return cls(
            listen=read.text("HORDE_OAI_HOST", "127.0.0.1"),
            port=read.bounded("HORDE_OAI_PORT", 7010, int, least=0, most=65_535),
            native_url=_native_url(read),
            redis_url=_front_redis_url(read),
            proxy_passkey=read.header_text("HORDE_OAI_PROXY_PASSKEY", ""),
            trusted_proxies=read.networks("HORDE_OAI_TRUSTED_PROXIES"),
            client_agent=read.header_text("HORDE_OAI_CLIENT_AGENT", "aihorde-oai-front:1:unknown"),
            stream_budget_seconds=read.bounded(
                "HORDE_OAI_STREAM_BUDGET_SECONDS", 600.0, float, least=1.0, most=day
            ),
            completion_budget_seconds=read.bounded(
                "HORDE_OAI_COMPLETION_BUDGET_SECONDS", 540.0, float, least=1.0, most=day
            ),
            no_worker_grace_seconds=read.bounded(
                "HORDE_OAI_NO_WORKER_GRACE_SECONDS", 60.0, float, least=0.0, most=day
            ),
            stream_open_seconds=read.bounded(
                "HORDE_OAI_STREAM_OPEN_SECONDS", 10.0, float, least=0.0, most=day
            ),
            keepalive_seconds=read.bounded(
                "HORDE_OAI_KEEPALIVE_SECONDS", 15.0, float, least=0.1, most=day
            ),
            # The native status route takes one read a second of a request, not more.
            poll_seconds=read.bounded("HORDE_OAI_POLL_SECONDS", 2.0, float, least=1.0, most=day),
            subscribed_poll_seconds=read.bounded(
                "HORDE_OAI_SUBSCRIBED_POLL_SECONDS", 10.0, float, least=1.0, most=day
            ),
            submit_attempts=read.bounded("HORDE_OAI_SUBMIT_ATTEMPTS", 3, int, least=1, most=100),
            max_open_requests=read.bounded(
                "HORDE_OAI_MAX_OPEN_REQUESTS", 1000, int, least=1, most=1_000_000
            ),
            models_cache_seconds=read.bounded(
                "HORDE_OAI_MODELS_CACHE_SECONDS", 5.0, float, least=0.0, most=day
            ),
            cors_origins=_front_origins(read),
            shutdown_seconds=read.bounded(
                "HORDE_OAI_SHUTDOWN_SECONDS", 30.0, float, least=0.0, most=day
            ),
            metrics_port=read.bounded("HORDE_OAI_METRICS_PORT", 0, int, least=0, most=65_535),
            otlp_endpoint=read.text("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
            log_level=read.log_level("HORDE_LOG_LEVEL"),
            log_json=read.text("HORDE_LOG_FORMAT", "text" if development else "json") == "json",
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed reads from the environment; an empty value counts as unset."""

    environment: Mapping[str, str]

    def text(self, name: str, default: str) -> str:
        return self.environment.get(name) or default

    def words(self, name: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.text(name, "").split(",") if word.strip())

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.text(name, "").lower()
        if value in {"", "0", "false", "no", "off"}:
            return default if value == "" else False
        if value in {"1", "true", "yes", "on"}:
            return True
        raise ConfigError(f"{name} is a switch: 1 or 0, true or false, yes or no, on or off.")

    def number[N: (int, float)](self, name: str, default: N, kind: Callable[[str], N]) -> N:
        try:
            return kind(self.environment[name]) if self.environment.get(name) else default
        except ValueError:
            raise ConfigError(f"{name} has to be a number.") from None

    def optional_number(self, name: str) -> int | None:
        return self.number(name, 0, int) if self.environment.get(name) else None

    def text_list(self, name: str) -> tuple[str, ...]:
        try:
            values = json.loads(self.text(name, "[]"))
        except ValueError:
            values = None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{name} has to be a JSON array of strings.")
        return tuple(values)

    def networks(self, name: str) -> tuple[Network, ...]:
        return tuple(self._network(name, word) for word in self.words(name))

    def _network(self, name: str, text: str) -> Network:
        try:
            return ip_network(text, strict=False)
        except ValueError:
            raise ConfigError(f"{name} holds {text!r}, which is no network.") from None

    def bounded[N: (int, float)](
        self, name: str, default: N, kind: Callable[[str], N], *, least: N, most: N
    ) -> N:
        """A number within bounds; a comparison with one that is no number fails."""
        value = self.number(name, default, kind)
        if not least <= value <= most:
            raise ConfigError(f"{name} has to lie between {least} and {most}.")
        return value

    def log_level(self, name: str) -> str:
        value = self.text(name, "INFO").upper()
        if value not in LOG_LEVELS:
            raise ConfigError(f"{name} has to be one of {', '.join(LOG_LEVELS)}.")
        return value

    def header_text(self, name: str, default: str) -> str:
        """Text that may be sent as the value of a header."""
        value = self.text(name, default)
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ConfigError(f"{name} has to be plain ASCII text without line breaks.")
        return value


def _database_url(read: _Reader) -> str:
    """The database address with its driver named: operators paste plain postgresql:// addresses."""
    url = read.text("DATABASE_URL", "")
    if not url and read.text("POSTGRES_URL", ""):
        user, password = read.text("POSTGRES_USER", "postgres"), read.text("POSTGRES_PASS", "")
        url = f"postgresql://{user}:{password}@{read.text('POSTGRES_URL', '')}"
    if not url:
        raise ConfigError("DATABASE_URL is not set.")
    scheme, separator, rest = url.partition("://")
    if separator and scheme in {"postgres", "postgresql"}:
        return f"postgresql+psycopg2://{rest}"
    return url


def _redis_url(read: _Reader) -> str:
    address = f"redis://{read.text('REDIS_IP', '127.0.0.1')}:{read.text('REDIS_PORT', '6379')}"
    return read.text("REDIS_URL", address)


def _s3_endpoint(read: _Reader) -> str:
    """The store's address. Keys have to come with it: the library would look for some in the
    environment's own ways.
    """
    endpoint = _s3_address(read, "S3_ENDPOINT") or _s3_address(read, "R2_TRANSIENT_ACCOUNT")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        if endpoint and not read.text(name, ""):
            raise ConfigError(f"{name} is not set, and the object store needs it.")
    return endpoint


def _s3_address(read: _Reader, name: str) -> str:
    address = read.text(name, "").rstrip("/")
    if address and not address.startswith(("http://", "https://")):
        raise ConfigError(f"{name} has to be an http or https address.")
    return address


def _native_url(read: _Reader) -> str:
    url = read.text("HORDE_OAI_NATIVE_URL", "http://127.0.0.1:7001/api").rstrip("/")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_usable = False
    if not is_usable or not url.isascii():
        raise ConfigError(
            "HORDE_OAI_NATIVE_URL has to be the http or https address of the API, such as http://127.0.0.1:7001/api."
        )
    return url


def _front_origins(read: _Reader) -> tuple[str, ...]:
    """Origins as browsers write them: one with a path, or in capitals, would match none."""
    origins = read.words("HORDE_OAI_CORS_ORIGINS") or ("*",)
    for origin in origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+", origin):
            raise ConfigError(
                f"HORDE_OAI_CORS_ORIGINS holds {origin!r}: it has to be * or origins such as https://example.com."
            )
    return origins


def _front_redis_url(read: _Reader) -> str | None:
    """The address with the database of the chat streams; None for `off`."""
    url = read.text("HORDE_OAI_REDIS_URL", "")
    if url == "off":
        return None
    name = "HORDE_OAI_REDIS_URL" if url else "REDIS_URL"
    parts = urlsplit(url or _redis_url(read))
    if parts.scheme not in {"redis", "rediss", "unix"}:
        raise ConfigError(
            f"{name} has to be a redis://, rediss:// or unix:// address, or HORDE_OAI_REDIS_URL be off."
        )
    if url and (parts.scheme == "unix" or parts.path.strip("/")):
        return url  # it names its database
    if parts.scheme == "unix":
        return f"unix://{parts.netloc}{parts.path}?db={CHAT_SIGNAL_DATABASE}"
    return urlunsplit(parts._replace(path=f"/{CHAT_SIGNAL_DATABASE}"))
