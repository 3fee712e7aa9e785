# SPDX-License-Identifier: AGPL-3.0-or-later
"""The moderators' rules for prompts: kept, tried, acting, and bounded in time."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import delete, insert

from devtools.services import ServiceAddresses
from horde.classes.base.stats import Filter
from horde.classes.base.user import UserRoleTypes
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import make_user
from tests.integration.text_horde import ADULT, get_request, refused


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "filters") as found:
        yield found


@pytest.fixture
def key(api: Api) -> str:
    """A moderator's key, in a horde without rules."""
    with transaction() as session:
        session.execute(delete(Filter))
    _, moderator = make_moderator()
    # Deleting through the API is what makes the process forget the rules of an earlier test.
    made = add(api, moderator, "nothing in particular")
    api.delete(f"/filters/{made['id']}", moderator)
    return moderator


def add(api: Api, key: str, regex: str, filter_type: int = 10, **body: Any) -> dict[str, Any]:
    answer = api.put("/filters", {"regex": regex, "filter_type": filter_type, **body}, key)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def try_prompt(api: Api, key: str, prompt: str, **body: Any) -> dict[str, Any]:
    answer = api.post("/filters", {"prompt": prompt, **body}, key)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def test_a_rule_is_kept_with_who_wrote_it(api: Api, key: str) -> None:
    user_id, other = make_moderator()
    rule = add(api, other, "secret ?club", replacement="club", description="from the forum")
    alias = api.get(f"/users/{user_id}").json["username"]
    assert rule == {
        "id": rule["id"],
        "regex": "secret ?club",
        "filter_type": 10,
        "description": "from the forum",
        "replacement": "club",
        "user": alias,
    }
    assert api.get(f"/filters/{rule['id']}", key).json == rule
    assert api.get("/filters", key).json == [rule]


def test_the_list_can_be_narrowed(api: Api, key: str) -> None:
    first = add(api, key, "50%", 10, description="a percentage")
    second = add(api, key, "other", 20, description="50_50")
    assert api.get("/filters?filter_type=20", key).json == [second]
    assert api.get("/filters?contains=50%25", key).json == [first]
    assert api.get("/filters?contains=50_", key).json == [second]
    assert api.get("/filters?filter_type=9", key).status_code == 400


def test_the_same_rule_again_is_answered_as_it_is(api: Api, key: str) -> None:
    first = add(api, key, "abc", 10, description="the first")
    assert add(api, key, "abc", 10, description="the second", replacement="x") == first
    assert add(api, key, "abc", 11)["id"] != first["id"]


@pytest.mark.race
def test_the_same_rule_added_by_many_at_once_is_there_once(api: Api, key: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: add(api, key, "at once")["id"], range(8)))
    assert len(ids) == 1
    assert len(api.get("/filters", key).json) == 1


def test_a_rule_is_changed_by_what_is_sent(api: Api, key: str) -> None:
    rule = add(api, key, "abc", replacement="x")
    changed = api.patch(f"/filters/{rule['id']}", {"description": "why"}, key)
    assert changed.json == {**rule, "description": "why", "user": changed.json["user"]}
    assert refused(api.patch(f"/filters/{rule['id']}", {}, key)) == (400, "NoFilterModSelected")
    assert refused(api.patch(f"/filters/{rule['id']}", {"reason": "x"}, key)) == (
        400,
        "NoFilterModSelected",
    )


def test_a_deleted_rule_is_gone(api: Api, key: str) -> None:
    rule = add(api, key, "abc")
    assert api.delete(f"/filters/{rule['id']}", key).json == {"message": "OK"}
    for answer in (
        api.get(f"/filters/{rule['id']}", key),
        api.patch(f"/filters/{rule['id']}", {"regex": "x"}, key),
        api.delete(f"/filters/{rule['id']}", key),
    ):
        assert refused(answer) == (404, "FilterNotFound")


@pytest.mark.parametrize("filter_id", ["x", "-1", "1.5", "99999999999999999999", "2147483648", "²"])
def test_an_id_that_no_rule_can_have_is_not_found(api: Api, key: str, filter_id: str) -> None:
    assert refused(api.get(f"/filters/{filter_id}", key)) == (404, "FilterNotFound")


@pytest.mark.parametrize(
    "body",
    [
        {"filter_type": 10},
        {"regex": "x"},
        {"regex": "", "filter_type": 10},
        {"regex": "(", "filter_type": 10},
        {"regex": "[z-a]", "filter_type": 10},
        {"regex": "x" * 4097, "filter_type": 10},
        {"regex": "x", "filter_type": 9},
        {"regex": "x", "filter_type": 30},
        {"regex": "x", "filter_type": "10"},
        {"regex": "x", "filter_type": 10, "replacement": "x" * 256},
        {"regex": "x", "filter_type": 10, "description": "x" * 513},
        {"regex": 1, "filter_type": 10},
        {"regex": "x\u0000", "filter_type": 10},
        [],
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(api: Api, key: str, body: Any) -> None:
    code = "NulByteInPayload" if "\u0000" in str(dict(body or {}).get("regex")) else "BadRequest"
    assert refused(api.put("/filters", body, key)) == (400, code)
    assert api.get("/filters", key).json == []


def test_a_change_to_a_rule_that_cannot_be_compiled_is_refused(api: Api, key: str) -> None:
    rule = add(api, key, "abc")
    assert refused(api.patch(f"/filters/{rule['id']}", {"regex": "("}, key)) == (400, "BadRequest")
    assert api.get(f"/filters/{rule['id']}", key).json["regex"] == "abc"


def test_nobody_but_moderators_sees_or_touches_rules(api: Api, key: str) -> None:
    rule = add(api, key, "abc")
    _, trusted = make_user(UserRoleTypes.TRUSTED)
    for caller, expected in (
        (trusted, (403, "NotModerator")),
        ("x" * 22, (401, "InvalidAPIKey")),
        (None, (400, "BadRequest")),
    ):
        for answer in (
            api.get("/filters", caller),
            api.put("/filters", {"regex": "x", "filter_type": 10}, caller),
            api.post("/filters", {"prompt": "x"}, caller),
            api.get("/filters/regex", caller),
            api.get(f"/filters/{rule['id']}", caller),
            api.patch(f"/filters/{rule['id']}", {"regex": "x"}, caller),
            api.delete(f"/filters/{rule['id']}", caller),
        ):
            assert refused(answer) == expected
    assert [each["regex"] for each in api.get("/filters", key).json] == ["abc"]


def test_rules_of_a_type_are_told_as_one_expression(api: Api, key: str) -> None:
    add(api, key, "a|b", 10)
    add(api, key, "c", 10)
    add(api, key, "d", 20)
    add(api, key, "e", 15)
    assert api.get("/filters/regex", key).json == [
        {"filter_type": 10, "regex": "(?:a|b)|(?:c)"},
        {"filter_type": 20, "regex": "(?:d)"},
    ]
    assert api.get("/filters/regex?filter_type=20", key).json == [
        {"filter_type": 20, "regex": "(?:d)"}
    ]


# Trying a prompt


def test_each_group_of_rules_counts_once(api: Api, key: str) -> None:
    add(api, key, "young", 10)
    add(api, key, "tiny", 11)
    add(api, key, "explicit", 20)
    for prompt, suspicion, matches in (
        ("a fine day", 0, []),
        ("a young day", 1, ["young"]),
        ("a young tiny day", 1, ["young", "tiny"]),
        ("an explicit day", 1, ["explicit"]),
        ("an explicit young day", 2, ["young", "explicit"]),
        ("an EXPLICIT, y.o.u.n.g day", 2, ["young", "EXPLICIT"]),
        ("an explicit day### young", 1, ["explicit"]),
        ("an explicit \U0001f476", 2, ["\U0001f476", "explicit"]),
        ("", 0, []),
    ):
        assert try_prompt(api, key, prompt) == {"suspicion": suspicion, "matches": matches}


def test_a_prompt_can_be_tried_by_one_type_alone(api: Api, key: str) -> None:
    add(api, key, "young", 10)
    add(api, key, "explicit", 20)
    add(api, key, "special", 15)
    prompt = "explicit young special"
    for filter_type, matches in ((10, ["young"]), (20, ["explicit"]), (15, ["special"]), (11, [])):
        tried = try_prompt(api, key, prompt, filter_type=filter_type)
        assert tried == {"suspicion": int(bool(matches)), "matches": matches}


def test_a_new_rule_acts_at_once_and_a_deleted_one_no_longer(api: Api, key: str) -> None:
    assert try_prompt(api, key, "a word")["suspicion"] == 0
    rule = add(api, key, "word", 20)
    assert try_prompt(api, key, "a word")["suspicion"] == 1
    api.patch(f"/filters/{rule['id']}", {"regex": "other"}, key)
    assert try_prompt(api, key, "a word")["suspicion"] == 0
    api.delete(f"/filters/{rule['id']}", key)
    assert try_prompt(api, key, "an other")["suspicion"] == 0


@pytest.mark.parametrize("bomb", ["(a|a)+$", "(a+)+$", "(?:a?){40}a{40}b", "(.*)*(.*)*(.*)*x"])
def test_a_rule_that_takes_for_ever_is_stopped(api: Api, key: str, bomb: str) -> None:
    add(api, key, bomb, 20)
    started = time.thread_time()
    answer = api.post("/filters", {"prompt": "a" * 5000}, key)
    assert answer.status_code in {200, 400}
    if answer.status_code == 400:
        assert answer.json["rc"] == "CorruptPrompt"
    assert time.thread_time() - started < 10


def test_a_rule_that_matches_everywhere_tells_a_hundred_matches(api: Api, key: str) -> None:
    add(api, key, r"\w+?", 20)
    tried = try_prompt(api, key, " ".join(f"w{number}" for number in range(5000)))
    assert 0 < len(tried["matches"]) <= 100


def test_a_stored_rule_that_cannot_be_compiled_leaves_the_others_acting(api: Api, key: str) -> None:
    with transaction() as session:
        session.execute(insert(Filter).values(regex="(", filter_type=20, replacement=""))
    add(api, key, "word", 20)
    assert try_prompt(api, key, "a word") == {"suspicion": 1, "matches": ["word"]}


def test_a_prompt_over_its_bound_is_refused(api: Api, key: str) -> None:
    assert refused(api.post("/filters", {"prompt": "x" * 100_001}, key)) == (400, "BadRequest")
    assert refused(api.post("/filters", {"filter_type": 10}, key)) == (400, "BadRequest")


# Acting


def test_a_rule_added_through_the_api_rewrites_prompts(api: Api, key: str) -> None:
    add(api, key, "secret club", 10, replacement="library")
    _, asker = make_user()
    body = {"prompt": "Tell me of the secret club", "models": [ADULT]}
    queued = api.post("/generate/text/async", body, asker)
    assert queued.status_code == 202, queued.json
    assert "library" in get_request(queued.json["id"]).prompt
    assert "secret" not in get_request(queued.json["id"]).prompt


def test_what_was_done_to_rules_is_recorded(api: Api, key: str) -> None:
    rule = add(api, key, "abc", reason="report 12")
    api.patch(f"/filters/{rule['id']}", {"regex": "abcd", "reason": "too wide"}, key)
    api.delete(f"/filters/{rule['id']}?reason=wrong", key)
    acts = api.list_acts(key, subject=f"filter%20{rule['id']}")
    assert [(act["action"], act["reason"]) for act in acts] == [
        ("filter.deleted", "wrong"),
        ("filter.changed", "too wide"),
        ("filter.added", "report 12"),
    ]
    assert acts[0]["details"]["regex"] == "abcd"
