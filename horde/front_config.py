# SPDX-License-Identifier: AGPL-3.0-or-later
"""The settings of the front; ``config`` says how settings are declared.

Source: docs/reference/configuration.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict

from horde.model_map import NO_NAMES, ModelMap
from horde.setting_kinds import (
    CHAT_SIGNAL_DATABASE,
    CONTEXT_FITS,
    DAY_SECONDS,
    REDIS_WORDS,
    LogLevel,
    LogsJson,
    build_redis_url,
    complete_settings,
    is_set,
    parse_front_redis,
    parse_origins,
    parse_redis_url,
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
    named,
    one_of,
    read_settings,
    within,
)


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
        Read(parse_front_redis, f"off, or {REDIS_WORDS}"),
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
        Read(parse_redis_url, REDIS_WORDS),
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
        Read(parse_origins, "* or origins such as https://example.com, separated by commas"),
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
        values = complete_settings(environment)
        if not is_set(values, "HORDE_OAI_REDIS_URL"):
            url = build_redis_url(values["REDIS_URL"], CHAT_SIGNAL_DATABASE)
            values["HORDE_OAI_REDIS_URL"] = url
        config = read_settings(cls, values)
        if config.responses_redis_url is not None and not config.responses_key_secret:
            raise ConfigError(
                "HORDE_OAI_RESPONSES_KEY_SECRET",
                "is not set, and HORDE_OAI_RESPONSES_REDIS_URL needs it.",
            )
        return config
