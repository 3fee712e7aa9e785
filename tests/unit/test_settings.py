# SPDX-License-Identifier: AGPL-3.0-or-later
"""What holds for every setting of every command, whatever stands in the environment."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from limits import parse_many
from sqlalchemy import make_url

from horde.cli.config import SETTINGS
from horde.cli.main import main
from horde.config import Config
from horde.front_config import FrontConfig
from horde.redis_ctrl import build_client
from horde.setting_kinds import parse_database_url, parse_limit
from horde.settings import ConfigError, is_place, iter_settings

BOUNDS = dict(iter_settings(*SETTINGS))
REQUIRED = {"DATABASE_URL": "postgresql://user:word@host/name", "secret_key": "salt"}
# The parts of an address are read only without it.
INSTEAD_OF_DATABASE_URL = {"POSTGRES_URL", "POSTGRES_USER", "POSTGRES_PASS"}

NONSENSE = st.one_of(
    st.text(st.characters(exclude_characters="\0"), max_size=60),
    st.text("0123456789.-+eE_ /;:@?#%[]{}\"',abcnifty", max_size=40),
    st.sampled_from(
        ["redis://", "postgresql://", "http://", "unix://", "[", "1/second;", ""]
    ).flatmap(lambda start: st.text(max_size=30).map(start.__add__)),
    st.integers().map(str),
    st.floats().map(str),
)


def read_all(name: str, value: str) -> None:
    """Read what the server and what the front would with this variable set."""
    environment = {**REQUIRED, name: value}
    if name in INSTEAD_OF_DATABASE_URL:
        environment = {"secret_key": "salt", "POSTGRES_URL": "host/name", name: value}
    Config.from_environment(environment)
    FrontConfig.from_environment(environment)


@pytest.mark.parametrize("url", ["redis://1", "unix:///path"])
def test_a_store_of_responses_without_a_secret_is_refused_by_the_name_of_the_secret(
    url: str,
) -> None:
    with pytest.raises(ConfigError, match=r"^HORDE_OAI_RESPONSES_KEY_SECRET is not set"):
        read_all("HORDE_OAI_RESPONSES_REDIS_URL", url)


def test_every_setting_has_bounds() -> None:
    assert all(BOUNDS.values())
    assert len(BOUNDS) > 70


# The refusals that depend on a second setting; none of them shows a value.
OTHER_PROBLEMS = {
    "HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED": "is on, and without S3_ENDPOINT there is nowhere to put"
    " them.",
    "HORDE_TEXT_FREE_OUTPUT_FLOOR": "has to be at most HORDE_TEXT_FREE_OUTPUT_CEILING.",
    "HORDE_TEXT_FREE_OUTPUT_WAIT_FLOOR_SECONDS": "has to be at least"
    " HORDE_TEXT_FREE_OUTPUT_WAIT_FULL_SECONDS.",
    "AWS_ACCESS_KEY_ID": "is not set, and the object store needs it.",
    "HORDE_OIDC_CLIENT_ID": "is not set, and HORDE_OIDC_ISSUER needs it.",
    "HORDE_OAI_RESPONSES_KEY_SECRET": "is not set, and HORDE_OAI_RESPONSES_REDIS_URL needs it.",
}


def find_refusal(name: str, value: str) -> ConfigError | None:
    try:
        read_all(name, value)
    except ConfigError as refused:
        return refused
    return None


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=30)
@given(value=NONSENSE)
def test_nonsense_is_refused_by_a_sentence_that_names_the_setting_and_shows_no_value(
    name: str, value: str
) -> None:
    refused = find_refusal(name, value)
    if refused is None:
        return
    if not value.strip():
        assert refused.problem == "is not set."
    elif refused.name == name:
        assert refused.problem in {f"has to be {BOUNDS[name]}.", OTHER_PROBLEMS.get(name)}
    else:
        assert refused.problem == OTHER_PROBLEMS[refused.name]


@pytest.mark.parametrize("name", [name for name, words in BOUNDS.items() if "number" in words])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "9" * 5000, "one", "0x10"])
def test_a_number_is_finite_and_written_in_digits(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} has to be"):
        read_all(name, value)


@pytest.mark.parametrize("name", [name for name, words in BOUNDS.items() if " from " in words])
def test_a_number_stays_within_what_its_refusal_says(name: str) -> None:
    found = re.search(r"from ([0-9.]+) to ([0-9]+)", BOUNDS[name])
    assert found
    for value in (float(found[1]) - 0.05, float(found[1]) - 1, int(found[2]) + 1):
        with pytest.raises(ConfigError, match=f"^{name} has to be"):
            read_all(name, str(value))


@given(text=NONSENSE)
@example("2/second;90/minute")
@example("1 per 2 hours")
def test_a_limit_that_is_taken_is_one_for_the_library(text: str) -> None:
    try:
        parse_limit(text)
    except ValueError:
        return
    assert all(limit.amount >= 1 for limit in parse_many(text))


@given(rest=st.text(st.characters(exclude_characters="\0"), max_size=60))
def test_an_address_that_is_taken_is_one_for_the_drivers(rest: str) -> None:
    for start in ("postgresql://", "postgresql://host/", "postgresql://u:"):
        try:
            url = parse_database_url(start + rest)
        except ValueError:
            continue
        make_url(url)
    for start in ("redis://", "redis://:", "redis://host?", "unix:///"):
        try:
            config = Config.from_environment({**REQUIRED, "REDIS_URL": start + rest})
        except ConfigError:
            continue
        build_client(config.redis_url, 0).close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", True),
        ("host.example.:80", True),
        ("xn--ls8h.la", True),
        ("127.0.0.1:65535", True),
        ("[::1]:80", True),
        ("[::1", False),
        ("::1", False),
        ("host:0", False),
        ("host:65536", False),
        ("a..b", False),
        ("-a", False),
        ("a" * 64, False),
        (".".join(["a" * 60] * 5), False),
        ("a b", False),
        ("", False),
    ],
)
def test_a_place_is_a_host_with_a_port_or_without(text: str, expected: bool) -> None:
    assert is_place(text) is expected


@pytest.mark.parametrize(
    ("words", "variables", "named"),
    [
        (["serve", "--port", "99999"], {}, "--port"),
        (["serve", "--workers", "0"], {}, "--workers"),
        (["serve"], {"HORDE_SERVER_THREADS": "0"}, "HORDE_SERVER_THREADS"),
        (["front", "--port", "seven"], {}, "--port"),
        (["front"], {"REDIS_URL": "redis://:pa/ss@host:port"}, "REDIS_URL"),
        (["db", "status"], {"DATABASE_URL": "foo"}, "DATABASE_URL"),
        (["user", "create", "--username", "a"], {"REDIS_URL": "foo"}, "REDIS_URL"),
        (["kudos", "audit"], {"HORDE_DEFAULT_LIMIT": "90"}, "HORDE_DEFAULT_LIMIT"),
        (["user", "create", "--username", "a"], {"secret_key": ""}, "secret_key"),
        (["store", "audit"], {"S3_ENDPOINT": "store:8333"}, "S3_ENDPOINT"),
        (["serve"], {"secret_key": ""}, "secret_key"),
    ],
)
def test_every_command_refuses_a_setting_by_one_sentence(
    words: list[str],
    variables: dict[str, str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (REQUIRED | variables).items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"horde {words[0]}: {named} [^\n]+\.\n", said.err), said.err
    assert said.out == ""
