# SPDX-License-Identifier: AGPL-3.0-or-later
"""The settings of the API and its commands: read once from the environment, typed, bounded, frozen.
Nothing else reads the environment.

Each field names its variables, its type and its bounds; ``horde.settings`` reads and refuses.
Constructed directly, as tests do, nothing is checked.
Source: docs/reference/configuration.md.
"""

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, ConfigDict

from horde.setting_kinds import (
    DAY_SECONDS,
    Bucket,
    DatabaseParts,
    IsDevelopment,
    Limit,
    LogLevel,
    LogsJson,
    RedisUrl,
    Texts,
    complete_settings,
    is_address_checker,
    is_set,
    parse_addresses,
    parse_aliases,
    parse_database_url,
)
from horde.settings import (
    MAX_PORT,
    READING,
    ConfigError,
    HeaderText,
    HostAddress,
    Key,
    Networks,
    Read,
    Text,
    WebAddress,
    matching,
    named,
    read_settings,
    within,
)

VERSION = "5.1.15"  # of the API and its schema; a test holds it to pyproject.toml
DEFAULT_VALIDATED_BACKENDS = (
    "AI Horde Worker",
    "AI Horde Worker~aphrodite~oai",
    "AI Horde Worker~aphrodite~kai",
    "KoboldCppEmbedWorker",
    "TabbyAPI",
    "Horde Bridge",  # our own reference worker: without it, it would earn 0.3 of a validated one
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of the API and its commands."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    development: IsDevelopment = False

    # services
    database_url: Annotated[
        str,
        Read(
            parse_database_url, "an address such as postgresql://user:password@host:5432/database"
        ),
        named("DATABASE_URL"),
    ] = field(repr=False)
    # Past a pooler that lends sessions; empty is database_url.
    database_direct_url: Annotated[
        str,
        Read(
            parse_database_url, "an address such as postgresql://user:password@host:5432/database"
        ),
        named("HORDE_DATABASE_DIRECT_URL"),
    ] = field(default="", repr=False)
    # For each answer of the database to a request.
    database_answer_seconds: Annotated[
        float, within(0.1, 3600), named("HORDE_DATABASE_ANSWER_SECONDS")
    ] = 10.0
    redis_url: RedisUrl = field(default="redis://127.0.0.1:6379", repr=False)
    # An AI Horde mirrors its caches to a list of servers; here one address serves all.
    ignored_settings: Annotated[
        tuple[str, ...],
        Read(lambda _: ("REDIS_SERVERS",), "anything, and is ignored"),
        named("REDIS_SERVERS"),
    ] = ()
    s3_endpoint: Annotated[WebAddress, named("S3_ENDPOINT", "R2_TRANSIENT_ACCOUNT")] = ""
    s3_access_key: Annotated[Key, named("AWS_ACCESS_KEY_ID")] = field(default="", repr=False)
    s3_secret_key: Annotated[Key, named("AWS_SECRET_ACCESS_KEY")] = field(default="", repr=False)
    s3_region: Annotated[
        str,
        matching(
            re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?").fullmatch,
            "at most 63 letters, digits and dashes",
        ),
        named("AWS_DEFAULT_REGION"),
    ] = "auto"
    # Where workers reach the store; empty is s3_endpoint.
    s3_public_endpoint: Annotated[WebAddress, named("S3_PUBLIC_ENDPOINT")] = ""
    source_image_bucket: Annotated[Bucket, named("R2_SOURCE_IMAGE_BUCKET")] = (
        "stable-horde-source-images"
    )
    chat_messages_bucket: Annotated[
        Bucket, named("R2_CHAT_MESSAGES_BUCKET", "R2_SOURCE_IMAGE_BUCKET")
    ] = "stable-horde-source-images"
    evidence_bucket: Annotated[Bucket, named("R2_EVIDENCE_BUCKET", "R2_SOURCE_IMAGE_BUCKET")] = (
        "stable-horde-source-images"
    )
    # Connections a process keeps. Of the library's 0, any number, the database would run out.
    db_pool_size: Annotated[int, within(1, 1000), named("SQLALCHEMY_POOL_SIZE")] = 15
    db_max_overflow: Annotated[int, within(0, 1000), named("SQLALCHEMY_MAX_OVERFLOW")] = 5
    db_pool_timeout_seconds: Annotated[
        float, within(0.1, 3600), named("SQLALCHEMY_POOL_TIMEOUT")
    ] = 30.0

    # server
    listen: Annotated[HostAddress, named("HORDE_LISTEN")] = "127.0.0.1"
    port: Annotated[int, within(1, MAX_PORT), named("HORDE_PORT")] = 7001
    # Processes of gunicorn, and the threads of each.
    server_workers: Annotated[int, within(1, 256), named("HORDE_SERVER_WORKERS")] = 2
    server_threads: Annotated[int, within(1, 1000), named("HORDE_SERVER_THREADS")] = 16
    # The Prometheus endpoint; 0 is off.
    metrics_port: Annotated[int, within(0, MAX_PORT), named("HORDE_METRICS_PORT")] = 0
    metrics_listen: Annotated[HostAddress, named("HORDE_METRICS_LISTEN")] = "127.0.0.1"
    otlp_endpoint: Annotated[WebAddress, named("OTEL_EXPORTER_OTLP_ENDPOINT")] = ""
    log_level: Annotated[LogLevel, named("HORDE_LOG_LEVEL")] = "INFO"
    log_json: LogsJson = True  # in development False

    # accounts
    # The salt of stored keys: it must never change once keys exist.
    secret_key: Annotated[Text, named("secret_key")] = field(repr=False)
    admins: Annotated[
        tuple[str, ...], Read(parse_aliases, 'a JSON array such as ["name#1"]'), named("ADMINS")
    ] = ()
    # Kudos in escrow for a promotion; None is never.
    kudos_trust_threshold: Annotated[
        int | None, within(0, 1_000_000_000), named("KUDOS_TRUST_THRESHOLD")
    ] = None
    test_apikeys: Annotated[bool, named("HORDE_TEST_APIKEYS")] = False

    # addresses and limits
    # Networks whose X-Forwarded-For is believed.
    trusted_proxies: Annotated[Networks, named("HORDE_TRUSTED_PROXIES")] = ()
    whitelisted_addresses: Annotated[
        tuple[str, ...],
        Read(parse_addresses, "addresses and networks, separated by commas"),
        named("HORDE_WHITELISTED_ADDRESSES"),
    ] = ()
    rate_limits_enabled: Annotated[
        bool, AfterValidator(operator.not_), named("HORDE_TEST_RATELIMIT_DISABLED")
    ] = True
    default_limit: Annotated[Limit, named("HORDE_DEFAULT_LIMIT")] = "90/minute"
    text_request_2sec_limit: Annotated[Limit, named("HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP")] = (
        "2/second"
    )
    text_request_90min_limit: Annotated[Limit, named("HORDE_TEXT_REQUEST_90MIN_LIMIT_PER_IP")] = (
        "90/minute"
    )
    chat_request_2sec_limit: Annotated[
        Limit,
        named("HORDE_CHAT_REQUEST_2SEC_LIMIT_PER_IP", "HORDE_TEXT_REQUEST_2SEC_LIMIT_PER_IP"),
    ] = "2/second"
    chat_request_90min_limit: Annotated[
        Limit,
        named("HORDE_CHAT_REQUEST_90MIN_LIMIT_PER_IP", "HORDE_TEXT_REQUEST_90MIN_LIMIT_PER_IP"),
    ] = "90/minute"
    status_read_limit: Annotated[Limit, named("HORDE_STATUS_READ_LIMIT")] = "600/minute"
    status_delete_limit: Annotated[Limit, named("HORDE_STATUS_DELETE_LIMIT")] = "60/minute"
    ip_checker: Annotated[
        str,
        matching(is_address_checker, "an http or https address with {ip} in it"),
        named("IP_CHECKER"),
    ] = ""
    ip_checker_no_data: Annotated[Text, named("IP_CHECKER_LC")] = ""

    # text and chat
    validated_backends: Annotated[Texts, named("HORDE_VALIDATED_BACKENDS")] = (
        DEFAULT_VALIDATED_BACKENDS
    )
    # A URL or a path; empty keeps the bundled list.
    text_model_reference: Annotated[Text, named("HORDE_IMAGE_LLM_REFERENCE")] = ""
    upfront_kudos_on_workerlist: Annotated[bool, named("HORDE_UPFRONT_KUDOS_ON_WORKERLIST")] = False
    require_matched_targeting: Annotated[bool, named("HORDE_REQUIRE_MATCHED_TARGETING")] = False
    # Tokens a request may use without a hold, by the estimated wait.
    free_output_ceiling: Annotated[
        int, within(0, 1_000_000), named("HORDE_TEXT_FREE_OUTPUT_CEILING")
    ] = 4096
    free_output_floor: Annotated[
        int, within(0, 1_000_000), named("HORDE_TEXT_FREE_OUTPUT_FLOOR")
    ] = 512
    free_output_wait_full_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS")
    ] = 60.0
    free_output_wait_floor_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS")
    ] = 300.0
    chat_admission_enabled: Annotated[bool, named("HORDE_CHAT_ADMISSION_ENABLED")] = True
    chat_messages_offload_enabled: Annotated[bool, named("HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED")] = (
        False
    )
    # The largest messages that stay inline.
    chat_messages_offload_bytes: Annotated[
        int, within(0, 64 * 1024 * 1024), named("HORDE_CHAT_MESSAGES_OFFLOAD_BYTES")
    ] = 262144
    chat_messages_offload_gzip: Annotated[bool, named("HORDE_CHAT_MESSAGES_OFFLOAD_GZIP")] = False

    # moderation
    paused_notice_webhook: Annotated[WebAddress, named("DISCORD_PAUSED_NOTICE_WEBHOOK")] = field(
        default="", repr=False
    )
    problem_user_webhook: Annotated[WebAddress, named("DISCORD_PROBLEM_USER_WEBHOOK")] = field(
        default="", repr=False
    )
    # Refused prompts of an address within an hour, after which it is refused itself.
    rejection_timeout_threshold: Annotated[
        int, within(0, 1_000_000), named("HORDE_MODEL_REJECTION_TIMEOUT_THRESHOLD")
    ] = 5

    # Refused prompts of an address within an hour whose text is kept; 0 keeps no text.
    evidence_texts_an_hour: Annotated[
        int, within(0, 1_000_000), named("HORDE_MODERATION_TEXTS_PER_HOUR")
    ] = 5
    # Days until the text, the address, and whatever else names somebody leave an event.
    evidence_text_days: Annotated[
        int, within(0, 3650), named("HORDE_MODERATION_TEXT_RETENTION_DAYS")
    ] = 365
    evidence_address_days: Annotated[
        int, within(0, 3650), named("HORDE_MODERATION_ADDRESS_RETENTION_DAYS")
    ] = 30
    evidence_days: Annotated[int, within(0, 3650), named("HORDE_MODERATION_RETENTION_DAYS")] = 365

    # sign-in
    oidc_issuer: Annotated[WebAddress, named("HORDE_OIDC_ISSUER")] = ""
    oidc_client_id: Annotated[HeaderText, named("HORDE_OIDC_CLIENT_ID")] = ""
    oidc_client_secret: Annotated[Key, named("HORDE_OIDC_CLIENT_SECRET")] = field(
        default="", repr=False
    )
    oidc_name: Annotated[Text, named("HORDE_OIDC_NAME")] = "the sign-in"
    # Where people reach the API, for addresses that others send them back to.
    public_url: Annotated[WebAddress, named("HORDE_URL")] = ""

    # names shown to people
    title: Annotated[Text, named("HORDE_TITLE")] = "Horde"
    contact_email: Annotated[Text, named("HORDE_EMAIL")] = ""
    repository: Annotated[WebAddress, named("HORDE_REPOSITORY")] = ""
    logo: Annotated[WebAddress, named("HORDE_LOGO")] = ""
    about: Annotated[Text, named("HORDE_ABOUT")] = ""
    front_url: Annotated[WebAddress, named("HORDE_FRONT_URL")] = ""
    # With terms.md, privacy.md, sponsors.md and news.json; what it lacks has a default.
    documents_folder: Annotated[
        str, matching(os.path.isdir, "the path of a folder"), named("HORDE_DOCUMENTS")
    ] = ""

    @property
    def session_url(self) -> str:
        """The address for what needs a database session of its own: migrations, the election."""
        return self.database_direct_url or self.database_url

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read a configuration; raises ConfigError naming the variable that is missing or cannot
        be used.
        """
        values = complete_settings(environment)
        if is_set(values, "POSTGRES_URL") and not is_set(values, "DATABASE_URL"):
            values["DATABASE_URL"] = read_settings(DatabaseParts, values).build_url()
        config = read_settings(cls, values)
        _check_store(config)
        _check_sign_in(config)
        _check_free_output(config)
        return config


def _check_sign_in(config: Config) -> None:
    """A provider without the rest of what sign-in needs would fail at the first person."""
    needed = {
        "HORDE_OIDC_CLIENT_ID": config.oidc_client_id,
        "HORDE_OIDC_CLIENT_SECRET": config.oidc_client_secret,
        "HORDE_URL": config.public_url,
    }
    for name, value in needed.items():
        if config.oidc_issuer and not value:
            raise ConfigError(name, "is not set, and HORDE_OIDC_ISSUER needs it.")


def _check_store(config: Config) -> None:
    """The keys have to come with the store: the library would look for some in the environment's
    own ways.
    """
    if not config.s3_endpoint:
        if config.chat_messages_offload_enabled:
            raise ConfigError(
                "HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED",
                "is on, and without S3_ENDPOINT there is nowhere to put them.",
            )
        return
    for name, key in (
        ("AWS_ACCESS_KEY_ID", config.s3_access_key),
        ("AWS_SECRET_ACCESS_KEY", config.s3_secret_key),
    ):
        if not key:
            raise ConfigError(name, "is not set, and the object store needs it.")


def _check_free_output(config: Config) -> None:
    """The allowance falls from the ceiling to the floor as the wait grows."""
    if config.free_output_floor > config.free_output_ceiling:
        raise ConfigError(
            "HORDE_TEXT_FREE_OUTPUT_FLOOR", "has to be at most HORDE_TEXT_FREE_OUTPUT_CEILING."
        )
    if config.free_output_wait_floor_seconds < config.free_output_wait_full_seconds:
        raise ConfigError(
            "HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS",
            "has to be at least HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS.",
        )
