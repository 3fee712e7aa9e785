# SPDX-License-Identifier: AGPL-3.0-or-later
"""The settings of a process: read once from the environment, typed, bounded, frozen. Nothing else
reads the environment.

Each field names its variables, its type and its bounds; ``horde.settings`` reads and refuses.
Constructed directly, as tests do, nothing is checked.
Source: docs/reference/configuration.md.
"""

import json
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Annotated, ClassVar, Self
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from pydantic import AfterValidator, ConfigDict

from horde.model_map import NO_NAMES, ModelMap
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
    is_place,
    is_short_text,
    is_web_address,
    matching,
    named,
    one_of,
    quote_user,
    read_settings,
    split_words,
    within,
)

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
CONTEXT_FITS = ("grow", "reject", "truncate_oldest")  # a test holds them to the contract's
MAX_LIMIT_AMOUNT = 1_000_000
DAY_SECONDS = 86_400
# Those of redis-py's address options that are of use to an operator; None is any text.
REDIS_OPTIONS: Mapping[str, frozenset[str] | None] = {
    "db": frozenset(map(str, range(16))),
    "username": None,
    "password": None,
    "ssl_ca_certs": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_cert_reqs": frozenset({"none", "optional", "required"}),
    "ssl_check_hostname": frozenset({"true", "false"}),
}

_LIMIT = re.compile(
    r"([0-9]{1,7}) ?(?:/|per) ?(?:[1-9][0-9]{0,2} ?)?(?:second|minute|hour|day|month|year)s?"
)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_SERVERS = re.compile(r"(?P<hosts>[^/?]*)(?:/(?P<database>[^/?]*))?(?:\?(?P<options>.*))?")


def parse_database_url(text: str) -> str:
    """The address of the database as SQLAlchemy reads it, the driver named and the password quoted.

    Operators paste plain postgresql:// addresses. Raises ValueError.
    """
    scheme, separator, rest = quote_user(text).partition("://")
    if scheme not in {"postgres", "postgresql", "postgresql+psycopg2"} or not text.isprintable():
        raise ValueError
    user, at, place = rest.rpartition("@") if not rest.startswith("/") else ("", "", rest)
    found = _SERVERS.fullmatch(place)
    if found is None or user.startswith(":"):
        raise ValueError
    *hosts, last = found["hosts"].split(",")
    if found["hosts"] and not (is_place(last) and all(is_place(f"{host}:1") for host in hosts)):
        raise ValueError
    options = parse_qs(found["options"] or "", strict_parsing=bool(found["options"]))
    if not (found["hosts"] or "host" in options) or "#" in place:
        raise ValueError
    return f"postgresql+psycopg2{separator}{user}{at}{place}"


def parse_redis_url(text: str) -> str:
    """The address of Redis with its password quoted. Raises ValueError."""
    url = quote_user(text)
    parts = urlsplit(url)
    if not text.isprintable() or parts.fragment:
        raise ValueError
    for name, value in parse_qsl(parts.query, strict_parsing=bool(parts.query)):
        values = REDIS_OPTIONS.get(name, frozenset())
        if values is not None and value not in values:
            raise ValueError
    place = parts.netloc.rpartition("@")[2]
    database = parts.path.removeprefix("/")
    if parts.scheme == "unix":
        is_usable = parts.path.startswith("/") and not place
    else:
        is_usable = is_place(place) and (not database or database.isdecimal())
    if parts.scheme not in {"redis", "rediss", "unix"} or not is_usable:
        raise ValueError
    return url


def build_redis_url(url: str, database: int) -> str:
    """The address of one logical database of Redis; whatever database the given one names is
    replaced.
    """
    parts = urlsplit(url)
    options = [option for option in parse_qsl(parts.query) if option[0] != "db"]
    if parts.scheme == "unix":  # urlunsplit would drop the slashes of an empty host
        query = urlencode([*options, ("db", str(database))])
        return f"unix://{parts.netloc}{parts.path}?{query}"
    return urlunsplit(parts._replace(path=f"/{database}", query=urlencode(options)))


def check_limit(text: str) -> str:
    """Rate limits such as ``2/second;90/minute``, as the library under the limiter reads them.
    Raises ValueError.
    """
    for part in text.split(";"):
        found = _LIMIT.fullmatch(part.strip().lower())
        if found is None or not 1 <= int(found[1]) <= MAX_LIMIT_AMOUNT:
            raise ValueError
    return text


def parse_texts(text: str) -> tuple[str, ...]:
    """A JSON array of texts. Raises ValueError."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError from None
    if not isinstance(values, list) or not all(is_short_text(value) for value in values):
        raise ValueError
    return tuple(values)


def _parse_aliases(text: str) -> tuple[str, ...]:
    aliases = parse_texts(text)
    if not all(re.fullmatch(r".+#[0-9]{1,18}", alias) for alias in aliases):
        raise ValueError
    return aliases


def _parse_addresses(text: str) -> tuple[str, ...]:
    """Addresses and networks as the rest of the server spells them."""
    return tuple(
        str(ip_network(word, strict=False) if "/" in word else ip_address(word))
        for word in split_words(text)
    )


def _parse_origins(text: str) -> tuple[str, ...]:
    """Origins as browsers write them: one with a path, or in capitals, would match none."""
    origins = tuple(split_words(text))
    if not all(_ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


def _check_place_of_database(text: str) -> str:
    if "@" in text:
        raise ValueError
    parse_database_url(f"postgresql://{text}")
    return text


def _is_address_checker(text: str) -> bool:
    address, _, query = text.replace("{ip}", "0").partition("?")
    return "{ip}" in text and is_web_address(address) and query.isascii() and query.isprintable()


def _parse_front_redis(text: str) -> str | None:
    """The address with the database of the chat streams unless it names one; None for `off`."""
    if text == "off":
        return None
    url = parse_redis_url(text)
    parts = urlsplit(url)
    is_path_database = parts.scheme != "unix" and parts.path.strip("/")
    if is_path_database or "db" in parse_qs(parts.query):
        return url
    return build_redis_url(url, CHAT_SIGNAL_DATABASE)


Limit = Annotated[
    str,
    Read(check_limit, f"limits such as 2/second;90/minute, each of 1 to {MAX_LIMIT_AMOUNT}"),
]
Bucket = Annotated[
    str,
    matching(
        re.compile(r"[0-9A-Za-z._-]{3,255}").fullmatch, "3 to 255 letters, digits, dots and dashes"
    ),
]
Texts = Annotated[tuple[str, ...], Read(parse_texts, "a JSON array of texts")]
LogLevel = Annotated[
    str,
    one_of(debug="DEBUG", info="INFO", warning="WARNING", error="ERROR", critical="CRITICAL"),
]
_REDIS_WORDS = "an address such as redis://:password@host:6379, rediss://host or unix:///path"


RedisUrl = Annotated[str, Read(parse_redis_url, _REDIS_WORDS), named("REDIS_URL")]
IsDevelopment = Annotated[
    bool, one_of(production=False, development=True), named("HORDE_ENVIRONMENT")
]
LogsJson = Annotated[bool, one_of(json=True, text=False), named("HORDE_LOG_FORMAT")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatabaseParts:
    """The address of the database as an AI Horde has it."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    place: Annotated[
        str,
        Read(_check_place_of_database, "host:port/database"),
        named("POSTGRES_URL"),
    ]
    user: Annotated[Text, named("POSTGRES_USER")] = "postgres"
    password: Annotated[Text, named("POSTGRES_PASS")] = field(default="", repr=False)

    def build_url(self) -> str:
        """The address with everything quoted: a part is taken as it stands."""
        return f"postgresql://{quote(self.user, '')}:{quote(self.password, '')}@{self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RedisParts:
    """The address of Redis in parts."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    host: Annotated[HostAddress, named("REDIS_IP")] = "127.0.0.1"
    port: Annotated[int, within(1, MAX_PORT), named("REDIS_PORT")] = 6379
    password: Annotated[Text, named("REDIS_PASSWORD")] = field(default="", repr=False)

    def build_url(self) -> str:
        """The address with the password quoted: it is taken as it stands."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f":{quote(self.password, '')}@" if self.password else ""
        return f"redis://{user}{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What decides about other settings, of the API and the front alike."""

    __pydantic_config__: ClassVar[ConfigDict] = READING

    development: IsDevelopment = False
    redis_url: RedisUrl = "redis://127.0.0.1:6379"


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
        tuple[str, ...], Read(_parse_aliases, 'a JSON array such as ["name#1"]'), named("ADMINS")
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
        Read(_parse_addresses, "addresses and networks, separated by commas"),
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
        matching(_is_address_checker, "an http or https address with {ip} in it"),
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
        values = _complete(environment)
        if _is_set(values, "POSTGRES_URL") and not _is_set(values, "DATABASE_URL"):
            values["DATABASE_URL"] = read_settings(_DatabaseParts, values).build_url()
        config = read_settings(cls, values)
        _check_store(config)
        _check_sign_in(config)
        _check_free_output(config)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Every setting of the OpenAI-compatible front, which has no database and no secret of its
    own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = READING

    listen: Annotated[HostAddress, named("HORDE_OAI_HOST")] = "127.0.0.1"
    port: Annotated[int, within(0, MAX_PORT), named("HORDE_OAI_PORT")] = 7010
    # Without /v2.
    native_url: Annotated[WebAddress, named("HORDE_OAI_NATIVE_URL")] = "http://127.0.0.1:7001/api"
    # None polls only.
    redis_url: Annotated[
        str | None,
        Read(_parse_front_redis, f"off, or {_REDIS_WORDS}"),
        named("HORDE_OAI_REDIS_URL"),
    ] = field(default="redis://127.0.0.1:6379/7", repr=False)
    # Of the front's service account.
    proxy_passkey: Annotated[Key, named("HORDE_OAI_PROXY_PASSKEY")] = field(default="", repr=False)
    # Networks whose X-Forwarded-For is believed.
    trusted_proxies: Annotated[Networks, named("HORDE_OAI_TRUSTED_PROXIES")] = ()
    # For clients that send none.
    client_agent: Annotated[HeaderText, named("HORDE_OAI_CLIENT_AGENT")] = (
        "aihorde-oai-front:1:unknown"
    )
    stream_budget_seconds: Annotated[
        float, within(1, DAY_SECONDS), named("HORDE_OAI_STREAM_BUDGET_SECONDS")
    ] = 600.0
    # Below the 600 s after which OpenAI's SDKs try again.
    completion_budget_seconds: Annotated[
        float, within(1, DAY_SECONDS), named("HORDE_OAI_COMPLETION_BUDGET_SECONDS")
    ] = 540.0
    no_worker_grace_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_OAI_NO_WORKER_GRACE_SECONDS")
    ] = 60.0
    stream_open_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_OAI_STREAM_OPEN_SECONDS")
    ] = 10.0
    keepalive_seconds: Annotated[
        float, within(0.1, DAY_SECONDS), named("HORDE_OAI_KEEPALIVE_SECONDS")
    ] = 15.0
    # Without a subscription. The native route takes one read of a request a second, not more.
    poll_seconds: Annotated[float, within(1, DAY_SECONDS), named("HORDE_OAI_POLL_SECONDS")] = 2.0
    # With one.
    subscribed_poll_seconds: Annotated[
        float, within(1, DAY_SECONDS), named("HORDE_OAI_SUBSCRIBED_POLL_SECONDS")
    ] = 10.0
    submit_attempts: Annotated[int, within(1, 100), named("HORDE_OAI_SUBMIT_ATTEMPTS")] = 3
    # Completions open at once.
    max_open_requests: Annotated[
        int, within(1, 1_000_000), named("HORDE_OAI_MAX_OPEN_REQUESTS")
    ] = 1000
    # Workers that may wait for a job at once, in all and of one key or address; 0 keeps none
    # waiting.
    max_waiting_pops: Annotated[int, within(0, 1_000_000), named("HORDE_OAI_MAX_WAITING_POPS")] = (
        4000
    )
    max_waiting_pops_per_caller: Annotated[
        int, within(0, 1_000_000), named("HORDE_OAI_MAX_WAITING_POPS_PER_CALLER")
    ] = 250
    models_cache_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_OAI_MODELS_CACHE_SECONDS")
    ] = 5.0
    # Of one text completion; each is a request of its own.
    completions_max_prompts: Annotated[
        int, within(1, 1000), named("HORDE_OAI_COMPLETIONS_MAX_PROMPTS")
    ] = 16
    # Names that programs ask for, and the models that are served instead.
    model_map: Annotated[
        ModelMap,
        Read(ModelMap.parse, 'a table such as [["claude-*", "a model"]], or @ and its file'),
        named("HORDE_OAI_MODEL_MAP"),
    ] = NO_NAMES
    # Of messages that send none: agents shorten their own history when they are told to.
    messages_context_fit: Annotated[
        str,
        one_of(**{fit: fit for fit in CONTEXT_FITS}),
        named("HORDE_OAI_MESSAGES_CONTEXT_FIT"),
    ] = CONTEXT_FITS[0]
    messages_ping_seconds: Annotated[
        float, within(0.1, DAY_SECONDS), named("HORDE_OAI_MESSAGES_PING_SECONDS")
    ] = 15.0
    # Of a response that says none. The native default would cut an agent's patch in half.
    responses_default_max_tokens: Annotated[
        int, within(16, 16384), named("HORDE_OAI_RESPONSES_DEFAULT_MAX_TOKENS")
    ] = 4096
    # Where responses are stored, written to unlike the chat signals. None stores nothing.
    responses_redis_url: Annotated[
        str | None,
        Read(parse_redis_url, _REDIS_WORDS),
        named("HORDE_OAI_RESPONSES_REDIS_URL"),
    ] = field(default=None, repr=False)
    # A record knows its key by a hash that is made with it.
    responses_key_secret: Annotated[Key, named("HORDE_OAI_RESPONSES_KEY_SECRET")] = field(
        default="", repr=False
    )
    # From the end of a response, or its last use.
    responses_ttl_seconds: Annotated[
        int, within(1, 30 * DAY_SECONDS), named("HORDE_OAI_RESPONSES_TTL_SECONDS")
    ] = 3600
    # Of one record; images count.
    responses_max_bytes: Annotated[
        int, within(1024, 64 * 1024 * 1024), named("HORDE_OAI_RESPONSES_MAX_BYTES")
    ] = 8 * 1024 * 1024
    responses_per_key: Annotated[int, within(1, 100_000), named("HORDE_OAI_RESPONSES_PER_KEY")] = (
        200
    )
    # The horde keeps a request for 20 minutes.
    background_budget_seconds: Annotated[
        float, within(1, DAY_SECONDS), named("HORDE_OAI_BACKGROUND_BUDGET_SECONDS")
    ] = 1140.0
    cors_origins: Annotated[
        tuple[str, ...],
        Read(_parse_origins, "* or origins such as https://example.com, separated by commas"),
        named("HORDE_OAI_CORS_ORIGINS"),
    ] = ("*",)
    # What its page is called, and where the pages of the API and the source are, which it links to.
    title: Annotated[Text, named("HORDE_TITLE")] = "Horde"
    public_url: Annotated[WebAddress, named("HORDE_URL")] = ""
    repository: Annotated[WebAddress, named("HORDE_REPOSITORY")] = ""
    # For what runs when the process is told to end.
    shutdown_seconds: Annotated[
        float, within(0, DAY_SECONDS), named("HORDE_OAI_SHUTDOWN_SECONDS")
    ] = 30.0
    # The Prometheus endpoint; 0 is off.
    metrics_port: Annotated[int, within(0, MAX_PORT), named("HORDE_OAI_METRICS_PORT")] = 0
    metrics_listen: Annotated[HostAddress, named("HORDE_METRICS_LISTEN")] = "127.0.0.1"
    otlp_endpoint: Annotated[WebAddress, named("OTEL_EXPORTER_OTLP_ENDPOINT")] = ""
    log_level: Annotated[LogLevel, named("HORDE_LOG_LEVEL")] = "INFO"
    log_json: LogsJson = True  # in development False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read a configuration; raises ConfigError naming the variable that cannot be used."""
        values = _complete(environment)
        if not _is_set(values, "HORDE_OAI_REDIS_URL"):
            url = build_redis_url(values["REDIS_URL"], CHAT_SIGNAL_DATABASE)
            values["HORDE_OAI_REDIS_URL"] = url
        config = read_settings(cls, values)
        if config.responses_redis_url is not None and not config.responses_key_secret:
            raise ConfigError(
                "HORDE_OAI_RESPONSES_KEY_SECRET",
                "is not set, and HORDE_OAI_RESPONSES_REDIS_URL needs it.",
            )
        return config


SETTINGS = (Config, FrontConfig, _DatabaseParts, _RedisParts)
"""Every dataclass of settings that the server and the front read."""


def _complete(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings with those that follow from others. Raises ConfigError."""
    values = dict(environment)
    if not _is_set(values, "REDIS_URL"):
        values["REDIS_URL"] = read_settings(_RedisParts, values).build_url()
    shared = read_settings(_Shared, values)
    values["REDIS_URL"] = shared.redis_url
    if not _is_set(values, "HORDE_LOG_FORMAT"):
        values["HORDE_LOG_FORMAT"] = "text" if shared.development else "json"
    if shared.development and not _is_set(values, "secret_key"):
        values["secret_key"] = DEVELOPMENT_SECRET
    return values


def _is_set(values: Mapping[str, str], name: str) -> bool:
    return bool(values.get(name, "").strip())


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
