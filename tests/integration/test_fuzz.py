# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever is sent, the API refuses it in JSON, at once, without a trace and without a word of
it.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devtools.services import ServiceAddresses
from tests.fuzz import Attack, list_paths, render, replace_at
from tests.integration._fake_chat_worker import build_pop_body
from tests.integration._fuzz_horde import FULL_CHAT, FULL_TEXT, FuzzHorde, fuzz_horde

SEED = 20
ATTACK_COUNT = 800
EXAMPLE_COUNT = 200
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(exclude_categories=())),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)
ROUTES: dict[str, dict[str, Any]] = {
    "/api/v2/generate/chat/async": FULL_CHAT,
    "/api/v2/generate/text/async": FULL_TEXT,
    "/api/v2/generate/text/pop": build_pop_body(),
}


@pytest.fixture(scope="module")
def horde(service_urls: ServiceAddresses) -> Iterator[FuzzHorde]:
    with fuzz_horde(service_urls, "fuzz") as horde:
        yield horde


def check_no_problems(horde: FuzzHorde) -> None:
    found, horde.problems = horde.problems, []
    assert not found, f"{len(found)} problems\n" + "\n".join(found[:20])


@pytest.mark.slow
def test_no_mutated_request_does_harm(horde: FuzzHorde) -> None:
    horde.attack(Random(SEED), ATTACK_COUNT)
    check_no_problems(horde)


@pytest.mark.slow
@settings(
    max_examples=EXAMPLE_COUNT,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_value_at_any_place_does_harm(horde: FuzzHorde, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(ROUTES)))
    place = data.draw(st.sampled_from(list_paths(ROUTES[path])))
    body = replace_at(ROUTES[path], place, data.draw(ANY_JSON))
    headers = (
        ("apikey", data.draw(st.sampled_from(horde.keys))),
        ("Content-Type", "application/json"),
    )
    horde.strike(Attack("POST", path, (), headers, render(body).encode("utf-8", "surrogatepass")))
    check_no_problems(horde)


@pytest.mark.parametrize(
    "path",
    [
        "users/",
        "workers/",
        "workers/name/",
        "status/models/",
        "generate/text/status/",
        "generate/chat/status/",
    ],
)
def test_a_long_name_does_not_come_back_whole(horde: FuzzHorde, path: str) -> None:
    answer = horde.app.test_client().get(f"/api/v2/{path}{'x' * 3000}")
    assert (answer.status_code, answer.json["rc"][-8:]) == (404, "NotFound")
    assert len(answer.data) < 500


def test_the_whole_examples_are_served(horde: FuzzHorde) -> None:
    horde.renew()
    for path, body in (("chat", FULL_CHAT), ("text", FULL_TEXT)):
        answer = horde.chat.post(f"/generate/{path}/async", body, horde.chat.requester_key)
        assert answer.status_code == 202, answer.json
