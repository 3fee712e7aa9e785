# SPDX-License-Identifier: AGPL-3.0-or-later
"""Styles for text and collections of them: their routes, and requests under them."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select

from devtools.services import ServiceAddresses
from horde.classes.base.stats import TextGenStatistic
from horde.classes.base.style import Style
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes, UserSharedKey
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.clock import utcnow
from horde.database.kudos import audit_ledger, fold_postings, get_effective_kudos
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import forget_everything, make_user
from tests.integration.text_horde import forget_copies

MODEL = "elinas/chronos-70b-v2"
STYLE = {
    "name": "terse",
    "info": "Answers in few words.",
    "prompt": "Be terse.\n{p}",
    "params": {"temperature": 0.5, "stop_sequence": ["\n"]},
    "models": [MODEL],
    "tags": ["short", "plain"],
}


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "text_styles") as api:
        yield api


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    with transaction() as session:
        for row in session.scalars(select(Style)):
            session.delete(row)
    forget_copies()
    return module_api


@pytest.fixture
def author(api: Api) -> tuple[int, str]:
    return make_user(UserRoleTypes.CUSTOMIZER, kudos=1000)


def refused(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json.get("rc")


def make_style(api: Api, key: str, **changes: Any) -> str:
    answer = api.post("/styles/text", STYLE | changes, key)
    assert answer.status_code == 200, answer.json
    assert (answer.json["message"], answer.json["warnings"]) == ("OK", [])
    return str(answer.json["id"])


def make_collection(api: Api, key: str, styles: list[str], **changes: Any) -> str:
    answer = api.post("/collections", {"name": "a set", "styles": styles, **changes}, key)
    assert answer.status_code == 200, answer.json
    return str(answer.json["id"])


def ask(api: Api, key: str, style: str | None, **body: Any) -> Any:
    sent = {"prompt": "How tall is Mont Blanc?", **body}
    if style is not None:
        sent["style"] = style
    return api.post("/generate/text/async", sent, key)


def queue(api: Api, key: str, style: str | None, **body: Any) -> str:
    answer = ask(api, key, style, **body)
    assert answer.status_code == 202, answer.json
    return str(answer.json["id"])


def get_request(request_id: str) -> TextWaitingPrompt:
    with transaction() as session:
        request = session.get_one(TextWaitingPrompt, UUID(request_id))
        session.refresh(request, ["submitted_prompt"])
        session.expunge(request)
    return request


def get_kudos(user_id: int) -> float:
    fold_postings()
    with transaction() as session:
        return float(get_effective_kudos(session, user_id))


# --- the routes


def test_a_customizer_makes_a_style_that_everybody_finds(api: Api, author: tuple[int, str]) -> None:
    user_id, key = author
    style_id = make_style(api, key)
    shown = api.get(f"/styles/text/{style_id}").json
    assert shown == {
        "id": style_id,
        "name": "terse",
        "info": "Answers in few words.",
        "prompt": "Be terse.\n{p}",
        "params": {"temperature": 0.5, "stop_sequence": ["\n"]},
        "public": True,
        "nsfw": False,
        "tags": ["short", "plain"],
        "models": [MODEL],
        "use_count": 0,
        "creator": shown["creator"],
    }
    assert shown["creator"].endswith(f"#{user_id}")
    assert api.get("/styles/text").json == [shown]
    for name in ("terse", "style::terse", f"{shown['creator'].replace('#', '%23')}::style::terse"):
        assert api.get(f"/styles/text_by_name/{name}").json == shown
    assert refused(api.get("/styles/text_by_name/collection::terse")) == (404, "StyleNotFound")
    assert refused(api.get("/styles/text_by_name/x%230::terse")) == (404, "StyleNotFound")
    assert refused(api.get(f"/styles/text/{uuid4()}")) == (404, "StyleNotFound")


@pytest.mark.parametrize(
    ("changes", "rc"),
    [
        ({"name": ""}, "BadRequest"),
        ({"name": "x" * 101}, "BadRequest"),
        ({"name": "fuck"}, "Profanity"),
        ({"info": "too short"}, "BadRequest"),
        ({"models": []}, "BadRequest"),
        ({"models": ["m"] * 6}, "BadRequest"),
        ({"models": None}, "BadRequest"),
        ({"tags": ["t"] * 11}, "BadRequest"),
        ({"tags": ["t" * 26]}, "BadRequest"),
        ({"prompt": "no place"}, "StylePromptMissingVars"),
        ({"prompt": "{p} {p.x}"}, "StylePromptFieldInvalid"),
        ({"params": {"temperature": 6}}, "BadRequest"),
        ({"params": {"sampler_order": [1]}}, "MissingFullSamplerOrder"),
        ({"params": {"max_length": 512, "max_context_length": 256}}, "TokenOverflow"),
        ({"sharedkey": str(uuid4())}, "SharedKeyInvalid"),
        ({"parameter_policy": {"override": "some"}}, "StyleDeclarationInvalid"),
        ({"parameter_policy": {"override": "listed"}}, "StylePolicyOverridableMisplaced"),
        (
            {"parameter_policy": {"override": "all", "overridable": ["top_p"]}},
            "StylePolicyOverridableMisplaced",
        ),
        (
            {"parameter_policy": {"override": "listed", "overridable": ["nothing"]}},
            "StyleDeclarationInvalid",
        ),
        ({"parameter_policy": {"odd": 1}}, "BadRequest"),
        (
            {"params": {"max_length": 200}, "parameter_policy": {"ceilings": {"max_length": 100}}},
            "StyleParameterAboveCeiling",
        ),
        ({"template_fields": [{"name": "who"}]}, "StyleDeclarationInvalid"),
        ({"template_fields": [{"name": "p"}]}, "StyleDeclarationInvalid"),
        (
            {"prompt": "{p} {a}", "template_fields": [{"name": "a"}, {"name": "a"}]},
            "StyleDeclarationInvalid",
        ),
        (
            {
                "prompt": "{p}" + "".join(f"{{f{n}}}" for n in range(17)),
                "template_fields": [{"name": f"f{n}"} for n in range(17)],
            },
            "StyleDeclarationInvalid",
        ),
    ],
)
def test_a_style_that_cannot_be_is_refused_and_not_made(
    api: Api, author: tuple[int, str], changes: dict[str, Any], rc: str
) -> None:
    assert refused(api.post("/styles/text", STYLE | changes, author[1])) == (400, rc)
    assert api.get("/styles/text").json == []


def test_who_may_not_make_a_style(api: Api, author: tuple[int, str]) -> None:
    path = "/styles/text"
    assert refused(api.post(path, STYLE, ANONYMOUS_KEY)) == (403, "StylesAnonForbidden")
    assert refused(api.post(path, STYLE, make_user()[1])) == (403, "StylesRequiresCustomizer")
    leaving = make_user(UserRoleTypes.TRUSTED, UserRoleTypes.DELETED)[1]
    assert refused(api.post(path, STYLE, leaving)) == (403, "DeletedUser")
    assert refused(api.post(path, STYLE, "nobody's")) == (401, "InvalidAPIKey")
    make_style(api, author[1])
    assert refused(api.post(path, STYLE, author[1])) == (400, "NameAlreadyExists")
    make_style(api, make_user(UserRoleTypes.TRUSTED)[1])  # the name of somebody else's is free


def test_a_change_keeps_what_it_leaves_out(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    path = f"/styles/text/{make_style(api, key, public=False, nsfw=True)}"
    before = api.get(path).json
    assert api.patch(path, {"info": "Other"}, key).status_code == 200
    assert api.get(path).json == before | {"info": "Other"}
    assert api.patch(path, {"tags": [], "models": ["m"], "public": True}, key).status_code == 200
    changed = api.get(path).json
    assert (changed["tags"], changed["models"], changed["public"]) == ([], ["m"], True)
    stranger = make_moderator()[1]
    assert refused(api.patch(path, {"info": "Mine"}, stranger)) == (403, "Forbidden")
    refusal = refused(api.patch(path, {"prompt": "none"}, key))
    assert refusal == (400, "StylePromptMissingVars")
    make_style(api, key, name="other")
    assert refused(api.patch(path, {"name": "other"}, key)) == (400, "NameAlreadyExists")
    missing = api.patch(f"/styles/text/{uuid4()}", {"info": "x"}, key)
    assert refused(missing) == (404, "StyleNotFound")


def test_its_author_or_a_moderator_deletes_a_style(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    path = f"/styles/text/{make_style(api, key)}"
    assert refused(api.delete(path, make_user(UserRoleTypes.TRUSTED)[1])) == (403, "Forbidden")
    assert api.delete(path, key).json == {"message": "OK"}
    assert refused(api.delete(path, key)) == (404, "StyleNotFound")
    moderator = make_moderator()[1]
    again = make_style(api, key)
    assert api.delete(f"/styles/text/{again}?reason=rude", moderator).status_code == 200
    assert api.list_acts(moderator, action="style.deleted")[0]["reason"] == "rude"


def test_lists_are_sorted_filtered_and_paged(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    for number in range(27):
        make_style(api, key, name=f"style {number:02}", tags=["even" if number % 2 == 0 else "odd"])
    make_style(api, key, name="private one", public=False)
    make_style(api, key, name="of another model", models=["m"])

    def names(query: str) -> list[str]:
        forget_copies()
        return [style["name"] for style in api.get(f"/styles/text?{query}").json]

    assert names("sort=age")[:2] == ["style 00", "style 01"]
    assert names("sort=age&page=2") == ["style 25", "style 26", "of another model"]
    assert names("page=3") == []
    assert len(names("tag=odd")) == 13
    assert names("model=m") == ["of another model"]
    queue(api, key, "style 07", models=[MODEL])
    assert names("sort=popular")[0] == "style 07"
    assert refused(api.get("/styles/text?sort=odd")) == (400, "BadRequest")


def test_a_style_for_images_is_not_shown_nor_used_as_one_for_text(
    api: Api, author: tuple[int, str]
) -> None:
    user_id, key = author
    with transaction() as session:
        style = Style(style_type="image", user_id=user_id, name="oil", prompt="{p}{np}")
        session.add(style)
        session.flush()
        style_id = str(style.id)
    assert refused(api.get(f"/styles/text/{style_id}")) == (400, "StyleGetMistmatch")
    assert refused(api.get("/styles/text_by_name/oil")) == (400, "StyleGetMistmatch")
    assert refused(api.patch(f"/styles/text/{style_id}", {"info": "x"}, key)) == (
        400,
        "StyleMismatch",
    )
    assert refused(ask(api, key, "oil")) == (400, "StyleMismatch")
    mixed = {"name": "mixed", "styles": [style_id, make_style(api, key)]}
    assert refused(api.post("/collections", mixed, key)) == (400, "StyleMismatch")


def test_the_contract_names_what_a_style_may_say(api: Api, author: tuple[int, str]) -> None:
    contract = api.get("/status/style_contract").json
    assert (contract["schema_version"], contract["image"]) == (1, {})
    text = contract["text"]
    assert "n" not in text["params"]
    assert text["params"]["temperature"] == {"type": "number", "minimum": 0.0, "maximum": 5.0}
    assert text["ceilings"] == ["max_length", "max_context_length", "n"]
    values = {"integer": 100, "number": 1, "boolean": True, "array": ["a"]}
    params = {name: values[each["type"]] for name, each in text["params"].items()}
    params |= {"sampler_order": list(range(7)), "max_context_length": 2048}
    style_id = make_style(api, author[1], params=params)
    assert api.get(f"/styles/text/{style_id}").json["params"].keys() == text["params"].keys()


# --- collections


def test_anybody_collects_styles(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    first, second = make_style(api, key), make_style(api, key, name="other")
    collector = make_user()[1]
    collection_id = make_collection(api, collector, [first, "style::other", first], info="Both")
    shown = api.get(f"/collections/{collection_id}").json
    creator = api.get(f"/styles/text/{first}").json["creator"]
    assert shown == {
        "id": collection_id,
        "name": "a set",
        "type": "text",
        "info": "Both",
        "public": True,
        "styles": [
            {"name": f"{creator}::style::other", "id": second},
            {"name": f"{creator}::style::terse", "id": first},
        ],
        "use_count": 0,
    }
    assert api.get("/collections").json == [shown]
    assert api.get("/collections?type=image").json == []
    assert api.get("/collection_by_name/collection::a set").json == shown
    assert refused(api.get("/collection_by_name/terse")) == (404, "CollectionNotFound")
    assert refused(api.get(f"/collections/{uuid4()}")) == (404, "CollectionNotFound")
    body = {"name": "a set", "styles": [first]}
    assert refused(api.post("/collections", body, collector)) == (400, "NameAlreadyExists")
    assert refused(api.post("/collections", body, ANONYMOUS_KEY)) == (403, "StylesAnonForbidden")
    unknown = {"name": "set", "styles": ["nothing"]}
    assert refused(api.post("/collections", unknown, collector)) == (404, "StyleNotFound")
    none = {"name": "set", "styles": []}
    assert refused(api.post("/collections", none, collector)) == (400, "BadRequest")


def test_a_collection_is_changed_by_its_author_and_deleted_by_a_moderator_too(
    api: Api, author: tuple[int, str]
) -> None:
    _, key = author
    first, second = make_style(api, key), make_style(api, key, name="other")
    path = f"/collections/{make_collection(api, key, [first])}"
    assert api.patch(path, {"styles": [second], "public": False}, key).status_code == 200
    changed = api.get(path).json
    assert ([style["id"] for style in changed["styles"]], changed["public"]) == ([second], False)
    assert api.patch(path, {"name": "renamed"}, key).status_code == 200
    assert [style["id"] for style in api.get(path).json["styles"]] == [second]
    moderator = make_moderator()[1]
    assert refused(api.patch(path, {"name": "x"}, moderator)) == (403, "Forbidden")
    assert refused(api.delete(path, make_user()[1])) == (403, "Forbidden")
    assert api.delete(path, moderator).json == {"message": "OK"}
    assert refused(api.get(path)) == (404, "CollectionNotFound")
    assert api.get(f"/styles/text/{second}").status_code == 200


# --- requests


def test_a_request_runs_under_its_style(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    style_id = make_style(api, key)
    request = get_request(
        queue(
            api,
            make_user(kudos=1000)[1],
            "terse",
            models=["another"],
            params={"temperature": 1.5, "top_p": 0.9, "n": 2, "max_length": 100},
        )
    )
    assert request.prompt == "Be terse.\nHow tall is Mont Blanc?"
    assert request.submitted_prompt == "How tall is Mont Blanc?"
    assert request.params == {
        "temperature": 0.5,
        "stop_sequence": ["\n"],
        "n": 2,
        "max_length": 100,
    }
    assert (request.n, request.max_length, str(request.style_id)) == (2, 100, style_id)
    assert api.get(f"/styles/text/{style_id}").json["use_count"] == 1
    pop = {"name": "a worker", "models": [MODEL], "max_length": 512, "max_context_length": 4096}
    owner = make_user()[1]
    job = api.post("/generate/text/pop", pop, owner).json
    assert job["payload"]["prompt"] == request.prompt
    reply = {"id": job["id"], "generation": "4,806 m.", "state": "ok"}
    assert api.post("/generate/text/submit", reply, owner).status_code == 200
    with transaction() as session:
        assert session.scalars(select(TextGenStatistic.style_id)).all() == [UUID(style_id)]


def test_a_style_that_is_not_there_refuses_the_request(api: Api, author: tuple[int, str]) -> None:
    for name in ("nothing", str(uuid4()), "style::nothing", "x" * 1000):
        assert refused(ask(api, author[1], name)) == (404, "StyleNotFound")


def test_a_style_of_somebody_else_costs_two_kudos_that_its_author_gets(
    api: Api, author: tuple[int, str]
) -> None:
    author_id, author_key = author
    requester_id, requester = make_user(kudos=1000)
    make_style(api, author_key)
    before = get_kudos(author_id), get_kudos(requester_id)
    request = get_request(queue(api, requester, "terse"))
    assert request.consumed_kudos == 3
    assert (get_kudos(author_id), get_kudos(requester_id)) == (before[0] + 2, before[1] - 3)
    details = api.get(f"/users/{author_id}", author_key).json
    assert details["kudos_details"]["styled"] == 2
    assert details["records"]["style"]["text"] == 1
    # One's own costs nothing more.
    assert get_request(queue(api, author_key, "terse")).consumed_kudos == 1
    assert get_request(queue(api, requester, None)).consumed_kudos == 1
    with transaction() as session:
        assert not audit_ledger(session).discrepancies


def test_a_refused_request_and_a_dry_run_pay_no_author(api: Api, author: tuple[int, str]) -> None:
    author_id, author_key = author
    requester = make_user(kudos=1000)[1]
    style_id = make_style(api, author_key)
    before = get_kudos(author_id)
    quoted = ask(api, requester, "terse", dry_run=True)
    assert quoted.status_code == 200
    assert quoted.json["resolved"]["style"].endswith("::style::terse")
    assert quoted.json["resolved"]["prompt"].startswith("Be terse.")
    assert ask(api, requester, "terse", workers=[str(uuid4())]).status_code == 404
    assert get_kudos(author_id) == before
    assert api.get(f"/styles/text/{style_id}").json["use_count"] == 0


def make_shared_key(user_id: int, **columns: Any) -> str:
    with transaction() as session:
        sharedkey = UserSharedKey(**{"user_id": user_id, "kudos": 500} | columns)
        session.add(sharedkey)
        session.flush()
        return str(sharedkey.id)


def test_the_shared_key_of_a_style_pays(api: Api, author: tuple[int, str]) -> None:
    author_id, author_key = author
    shared = make_shared_key(author_id, max_text_tokens=50)
    style_id = make_style(api, author_key, sharedkey=shared)
    request = get_request(queue(api, ANONYMOUS_KEY, "terse", params={"max_length": 100}))
    assert (request.user_id, str(request.sharedkey_id)) == (author_id, shared)
    assert request.consumed_kudos == 1  # the author pays, so nothing is added for the style
    assert shared not in str(api.get(f"/styles/text/{style_id}").json)
    direct = api.post("/generate/text/async", {"prompt": "x"}, shared)
    assert refused(direct) == (403, "SharedKeyAssignedStyles")


def test_a_request_that_a_styles_key_pays_is_read_by_who_sent_it(
    api: Api, author: tuple[int, str]
) -> None:
    author_id, author_key = author
    shared = make_shared_key(author_id)
    style_id = make_style(api, author_key, sharedkey=shared)
    sender_id, sender = make_user()
    own = make_shared_key(sender_id)
    for key in (sender, own):
        body = {"prompt": "Once", "style": style_id}
        request_id = api.post("/generate/text/async", body, key).json["id"]
        path = f"/generate/text/request/{request_id}"
        assert api.get(path, key).json["prompt"] == "Once"
        assert api.get(path, sender).status_code == 200
        assert api.get(path, author_key).status_code == 200  # the key that pays is theirs
        for other in (shared, make_shared_key(sender_id), make_user()[1]):
            assert refused(api.get(path, other)) == (403, "NotRequestOwner")


def test_a_styles_key_opens_no_door_that_is_closed_to_the_sender(
    api: Api, author: tuple[int, str]
) -> None:
    author_id, author_key = author
    style_id = make_style(api, author_key, sharedkey=make_shared_key(author_id))
    body = {"prompt": "... ?!", "style": style_id}
    assert refused(api.post("/generate/text/async", body, "x" * 22)) == (401, "InvalidAPIKey")
    _, deleted = make_user(UserRoleTypes.DELETED)
    assert refused(api.post("/generate/text/async", body, deleted)) == (403, "DeletedUser")
    shared = make_shared_key(author_id)
    plain = make_style(api, author_key, name="plain", prompt="{p}", sharedkey=shared)
    _, flagged = make_user(UserRoleTypes.FLAGGED)
    body = {"prompt": "... ?!", "style": plain}
    assert refused(api.post("/generate/text/async", body, flagged)) == (400, "CorruptPrompt")


def test_a_shared_key_that_ran_out_leaves_the_request_to_its_sender(
    api: Api, author: tuple[int, str]
) -> None:
    author_id, author_key = author
    shared = make_shared_key(author_id)
    make_style(api, author_key, sharedkey=shared)
    with transaction() as session:
        session.get_one(UserSharedKey, UUID(shared)).expiry = utcnow() - timedelta(days=1)
    requester_id, requester = make_user(kudos=1000)
    assert get_request(queue(api, requester, "terse")).user_id == requester_id
    assert refused(ask(api, "nobody's", "terse")) == (401, "InvalidAPIKey")


def test_only_a_usable_key_of_ones_own_is_attached(api: Api, author: tuple[int, str]) -> None:
    author_id, key = author
    path, body = "/styles/text", STYLE
    foreign = make_shared_key(make_user()[0])
    assert refused(api.post(path, body | {"sharedkey": foreign}, key)) == (400, "SharedKeyInvalid")
    empty = make_shared_key(author_id, kudos=0)
    assert refused(api.post(path, body | {"sharedkey": empty}, key)) == (400, "SharedKeyEmpty")
    expired = make_shared_key(author_id, expiry=utcnow() - timedelta(days=1))
    assert refused(api.post(path, body | {"sharedkey": expired}, key)) == (400, "SharedKeyExpired")
    style_id = make_style(api, key)
    good = {"sharedkey": make_shared_key(author_id)}
    assert api.patch(f"{path}/{style_id}", good, key).status_code == 200


def test_a_collection_runs_one_of_its_styles_and_counts_both(
    api: Api, author: tuple[int, str]
) -> None:
    _, key = author
    ids = [make_style(api, key), make_style(api, key, name="other", prompt="Other.\n{p}")]
    collection_id = make_collection(api, key, ids)
    used = {str(get_request(queue(api, key, name)).style_id) for name in ["a set"] * 12}
    assert used == set(ids)
    by_id = get_request(queue(api, key, collection_id)).style_id
    assert str(by_id) in ids
    assert api.get(f"/collections/{collection_id}").json["use_count"] == 13
    counts = [api.get(f"/styles/text/{style_id}").json["use_count"] for style_id in ids]
    assert sum(counts) == 13


def test_a_policy_lets_requests_change_what_it_lists(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    policy = {
        "override": "listed",
        "overridable": ["temperature"],
        "ceilings": {"max_length": 100, "n": 2},
    }
    make_style(api, key, parameter_policy=policy)
    params = {"temperature": 1.5, "top_p": 0.9, "max_length": 100}
    request = get_request(queue(api, key, "terse", params=params))
    assert request.params["temperature"] == 1.5
    assert "top_p" not in request.params
    for above in ({"max_length": 101}, {"n": 3}):
        refusal = refused(ask(api, key, "terse", params=above))
        assert refusal == (400, "StyleParameterAboveCeiling")


def test_template_fields_have_as_many_words_as_a_prompt(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    fields = [{"name": "tone"}, {"name": "topic"}]
    make_style(api, key, prompt="{tone} {topic} {p}", template_fields=fields)

    def ask_with(tone: int, topic: int) -> Any:
        values = {"tone": "word " * tone, "topic": "word\n" * topic}
        return ask(api, key, "terse", template_fields=values, dry_run=True)

    assert refused(ask_with(7501, 0)) == (400, "InvalidPromptSize")
    assert refused(ask_with(3750, 3751)) == (400, "InvalidPromptSize")
    assert ask_with(3750, 3750).status_code == 200


def test_template_fields_are_filled_in(api: Api, author: tuple[int, str]) -> None:
    _, key = author
    fields = [{"name": "who", "required": True, "description": "Who speaks."}, {"name": "mood"}]
    make_style(api, key, prompt="{who} ({mood}): {p}", template_fields=fields)
    request = get_request(
        queue(api, key, "terse", template_fields={"who": "A {mood} bard", "mood": "sad"})
    )
    assert request.prompt == "A {mood} bard (sad): How tall is Mont Blanc?"
    assert get_request(queue(api, key, "terse", template_fields={"who": "x"})).prompt.startswith(
        "x (): "
    )
    missing = ask(api, key, "terse", template_fields={"mood": "sad"})
    assert refused(missing) == (400, "TemplateFieldMissing")
    unknown = ask(api, key, "terse", template_fields={"who": "x", "odd": "y"})
    assert refused(unknown) == (400, "TemplateFieldUnknown")
    lone = ask(api, key, None, template_fields={"who": "x"})
    assert refused(lone) == (400, "TemplateFieldsRequireStyle")
    wrong = ask(api, key, "terse", template_fields={"who": 7})
    assert refused(wrong) == (400, "BadRequest")
    plain = make_style(api, key, name="plain")
    make_collection(api, key, ["terse", plain])
    for _ in range(5):
        assert str(get_request(queue(api, key, "a set")).style_id) == plain
    none = ask(api, key, "a set", template_fields={"odd": "x"})
    assert refused(none) == (400, "TemplateFieldsMatchNoCollectionStyle")


def test_style_limits_count_writes_of_an_address(service_urls: ServiceAddresses) -> None:
    with own_api(service_urls, "style_limits", rate_limits_enabled=True) as api:
        key = make_user()[1]
        answers = [api.post("/styles/text", STYLE, key).status_code for _ in range(3)]
        assert answers == [403, 403, 429]
