# SPDX-License-Identifier: AGPL-3.0-or-later
"""Evidence of prompts that were refused or reported: what is kept, who reads it, when it goes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update

from devtools.services import ServiceAddresses
from horde import r2, redis_ctrl
from horde.actions import evidence, settle_jobs
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.base.moderation import ModerationEvent
from horde.classes.base.user import UserRoleTypes
from horde.clock import utcnow
from horde.database import caches
from horde.database.evidence import DELETE_AFTER, MAX_STAGE_CHARACTERS
from horde.db import transaction
from horde.exceptions import ServiceUnavailable
from horde.r2 import StoreUnavailable
from tests.integration.api_horde import Api, let_rest, make_moderator, own_api
from tests.integration.rows import empty_tables, make_user, make_worker
from tests.integration.text_horde import ADULT, KNOWN, refused

PATH = "/operations/moderation/prompts"
BAD = "?!? ... ?!?"  # of punctuation nothing is left
ADDRESS = "198.51.100.9"


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "evidence") as found:
        yield found


@pytest.fixture
def api(module_api: Api) -> Api:
    """A horde without evidence, that refuses nobody."""
    empty_tables("moderation_events")
    for database in (redis_ctrl.address_timeout_db, redis_ctrl.address_suspicion_db):
        redis_ctrl.call(database, lambda client: client.flushdb())
    caches.clear_all()
    return module_api


def ask_badly(
    api: Api, key: str, prompt: str = BAD, address: str = ADDRESS, **headers: str
) -> None:
    body = {"prompt": prompt, "models": [ADULT]}
    answer = api.post("/generate/text/async", body, key, address=address, **headers)
    assert refused(answer) == (400, "CorruptPrompt")


def make_flagged() -> tuple[int, str]:
    return make_user(UserRoleTypes.FLAGGED)


def list_events(api: Api, key: str | None = None, **query: object) -> list[dict[str, Any]]:
    """What a moderator reads."""
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    answer = api.get(f"{PATH}?{asked}", key or make_moderator()[1])
    assert answer.status_code == 200, answer.json
    assert answer.headers["Cache-Control"] == "private, no-store"
    return list(answer.json)


def age_events(days: float) -> None:
    """Let every event have happened so much earlier."""
    away = timedelta(days=days)
    with transaction() as session:
        session.execute(update(ModerationEvent).values(created=ModerationEvent.created - away))


def let_deletions_be_due() -> None:
    with transaction() as session:
        session.execute(
            update(ModerationEvent).values(
                text_changed=ModerationEvent.text_changed - DELETE_AFTER - timedelta(seconds=1)
            )
        )


def expire(api: Api) -> None:
    evidence.expire_evidence(api.app.extensions[CONFIG_EXTENSION])


def get_rows() -> list[ModerationEvent]:
    with transaction() as session:
        return list(session.scalars(select(ModerationEvent).order_by(ModerationEvent.id)))


def list_objects() -> list[str]:
    return [key for _, key in r2.list_objects() if key.endswith(r2.EVIDENCE_SUFFIX)]


def test_a_refused_prompt_is_kept_and_moves_to_the_store(api: Api) -> None:
    user_id, key = make_flagged()
    ask_badly(api, key)
    (waiting,) = list_events(api)
    assert waiting["text"] == "waiting"
    evidence.store_evidence()
    (event,) = list_events(api)
    assert event == waiting | {"text": "stored"}
    (row,) = get_rows()
    assert row.prompts is None
    assert json.loads(r2.get_object(f"{row.object_id}_evidence.json"))["submitted"] == BAD
    assert {name: event[name] for name in ("reason", "user_id", "ipaddr", "models", "is_chat")} == {
        "reason": "model_rejection",
        "user_id": user_id,
        "ipaddr": ADDRESS,
        "models": [ADULT],
        "is_chat": False,
    }
    assert event["prompts"] == {"submitted": BAD, "moderation": BAD, "effective": None}
    assert (event["notes"], event["worker_id"], event["is_anonymised"]) == ([], None, False)


def test_the_reason_tells_the_account_from_the_model(api: Api) -> None:
    _, key = make_flagged()
    answer = api.post("/generate/text/async", {"prompt": BAD, "models": [KNOWN]}, key)
    assert refused(answer) == (400, "CorruptPrompt")
    assert [event["reason"] for event in list_events(api)] == ["filter_rejection"]


def test_a_template_is_judged_with_its_prompt_and_the_submission_kept_beside_it(api: Api) -> None:
    _, author = make_user(UserRoleTypes.TRUSTED)
    style = {
        "name": "dots",
        "info": "Dots around it all",
        "prompt": "... {p} ...",
        "params": {},
        "models": [ADULT],
    }
    style_id = api.post("/styles/text", style, author).json["id"]
    _, key = make_flagged()
    answer = api.post("/generate/text/async", {"prompt": "!!", "style": style_id}, key)
    assert refused(answer) == (400, "CorruptPrompt")
    (event,) = list_events(api)
    assert event["prompts"]["submitted"] == "!!"
    assert event["prompts"]["moderation"] == "... !! ..."


def test_a_refused_chat_is_kept_as_its_flattened_text(api: Api) -> None:
    _, key = make_flagged()
    chat = {"model": ADULT, "messages": [{"role": "user", "content": BAD}]}
    assert refused(api.post("/generate/chat/async", chat, key)) == (400, "CorruptPrompt")
    (event,) = list_events(api)
    assert event["is_chat"] is True
    assert event["prompts"]["submitted"] == f"user: {BAD}"


def test_what_a_worker_reports_is_kept_with_who_reported_it(api: Api) -> None:
    asker_id, asker = make_user()
    _, owner = make_user(UserRoleTypes.TRUSTED)
    queued = api.post("/generate/text/async", {"prompt": "Tell me", "models": [KNOWN]}, asker)
    pop = {"name": f"reporter {asker_id}", "models": [KNOWN], "max_context_length": 4096}
    job = api.post("/generate/text/pop", pop, owner).json
    reply = {"id": job["id"], "generation": "", "state": "csam"}
    assert api.post("/generate/text/submit", reply, owner).json["reward"] > 0
    (event,) = list_events(api)
    assert (event["reason"], event["user_id"]) == ("worker_csam", asker_id)
    assert event["prompts"]["submitted"] == "Tell me"
    shown = api.get(f"/workers/name/reporter {asker_id}").json
    assert event["worker_id"] == shown["id"]
    assert list_events(api, worker_id=shown["id"]) == [event]
    assert queued.status_code == 202


def test_of_one_address_five_texts_an_hour_are_kept_and_every_event(api: Api) -> None:
    _, key = make_flagged()
    for _ in range(7):
        redis_ctrl.call(redis_ctrl.address_timeout_db, lambda client: client.flushdb())
        ask_badly(api, key)
    states = [event["text"] for event in reversed(list_events(api))]
    assert states == ["waiting"] * 5 + ["none"] * 2


def test_without_the_setting_no_text_is_kept(service_urls: ServiceAddresses, api: Api) -> None:
    del api
    with own_api(service_urls, "evidence_off", evidence_texts_an_hour=0) as other:
        ask_badly(other, make_flagged()[1])
        (event,) = list_events(other)
        assert (event["text"], event["prompts"]) == ("none", None)


def test_long_texts_are_cut_and_odd_ones_come_back_as_they_were(api: Api) -> None:
    _, key = make_flagged()
    odd = "«!…\u2028»" * 4000
    ask_badly(api, key, odd)
    (event,) = list_events(api)
    assert event["prompts"]["submitted"] == odd[:MAX_STAGE_CHARACTERS]
    evidence.store_evidence()
    assert list_events(api) == [event | {"text": "stored"}]


def test_moderators_leave_no_evidence(api: Api) -> None:
    _, moderator = make_user(UserRoleTypes.MODERATOR, UserRoleTypes.FLAGGED)
    ask_badly(api, moderator)
    assert list_events(api) == []


def test_the_list_is_for_moderators_alone(api: Api) -> None:
    _, key = make_flagged()
    ask_badly(api, key)
    assert refused(api.get(PATH, key)) == (403, "NotModerator")
    assert refused(api.get(PATH, "x" * 22)) == (401, "InvalidAPIKey")
    assert refused(api.get(PATH)) == (400, "BadRequest")
    note = api.post(f"{PATH}/1/notes", {"note": "hm"}, key)
    assert refused(note) == (403, "NotModerator")


def test_who_read_a_text_is_recorded_without_it(api: Api) -> None:
    ask_badly(api, make_flagged()[1])
    moderator_id, key = make_moderator()
    (event,) = list_events(api, key)
    (act,) = api.list_acts(key, user_id=moderator_id)
    assert (act["action"], act["subject"]) == ("evidence.read", "evidence")
    assert act["details"] == {"events": [event["id"]]}


def test_events_are_found_by_whom_they_concern_and_when(api: Api) -> None:
    (first_id, first), (second_id, second) = make_flagged(), make_flagged()
    ask_badly(api, first)
    ask_badly(api, second, address="2001:db8:5:5::1")
    newest, oldest = list_events(api)
    assert [newest["user_id"], oldest["user_id"]] == [second_id, first_id]
    assert newest["ip_subject_key"] != oldest["ip_subject_key"]
    for query, found in {
        f"user_id={first_id}": [oldest],
        f"event_id={newest['id']}": [newest],
        f"ipaddr={ADDRESS}": [oldest],
        "ipaddr=2001:db8:5:5::77": [newest],
        f"ip_subject_key={newest['ip_subject_key']}": [newest],
        f"before_id={newest['id']}": [oldest],
        "limit=1": [newest],
        "since=2100-01-01": [],
        "until=2100-01-01T00:00:00%2B02:00": [newest, oldest],
        "until=2001-01-01T00:00:00Z": [],
        "user_id=nobody": [],
        "worker_id=nobody": [],
        "proxied_account=nobody": [],
    }.items():
        answer = api.get(f"{PATH}?{query}", make_moderator()[1])
        assert answer.json == found, query


@pytest.mark.parametrize(
    ("query", "rc"),
    [
        ("limit=0", "InvalidOperationsLimit"),
        ("limit=101", "InvalidOperationsLimit"),
        ("limit=many", "InvalidOperationsLimit"),
        ("before_id=0", "InvalidOperationsCursor"),
        ("before_id=-1", "InvalidOperationsCursor"),
        ("before_id=9223372036854775808", "InvalidOperationsCursor"),
        ("since=yesterday", "InvalidModerationTimeRange"),
        ("until=0001-01-01T00:00:00%2B23:00", "InvalidModerationTimeRange"),
        ("since=2026-02-01&until=2026-01-01", "InvalidModerationTimeRange"),
        ("ipaddr=nowhere", "InvalidModerationAddressFilter"),
        ("ipaddr=198.51.100.0/24", "InvalidModerationAddressFilter"),
        ("ip_subject_key=abc", "InvalidModerationAddressFilter"),
        (f"ipaddr=::1&ip_subject_key={'0' * 32}", "InvalidModerationAddressFilter"),
        ("event_id=first", "InvalidModerationEventID"),
        (f"event_id={'9' * 5000}", "InvalidModerationEventID"),
    ],
)
def test_a_filter_that_cannot_be_has_a_code_of_its_own(api: Api, query: str, rc: str) -> None:
    assert refused(api.get(f"{PATH}?{query}", make_moderator()[1])) == (400, rc)


def test_moderators_note_what_they_found(api: Api) -> None:
    ask_badly(api, make_flagged()[1])
    moderator_id, key = make_moderator()
    (event,) = list_events(api)
    path = f"{PATH}/{event['id']}/notes"
    answer = api.post(path, {"note": "  Told the owner.\n"}, key)
    assert answer.status_code == 200
    assert (answer.json["note"], answer.json["user_id"]) == ("Told the owner.", moderator_id)
    assert list_events(api)[0]["notes"] == [answer.json]
    assert api.list_acts(key, action="evidence.noted")[0]["subject"] == f"evidence {event['id']}"
    for note in (None, "", "  ", "x" * 2001, 5, ["x"]):
        assert refused(api.post(path, {"note": note}, key)) == (400, "InvalidModerationNote")
    assert refused(api.post(path, {}, key)) == (400, "InvalidModerationNote")
    for number in ("999999", str(2**63 - 1)):
        unknown = api.post(f"{PATH}/{number}/notes", {"note": "x"}, key)
        assert refused(unknown) == (404, "ModerationEventNotFound")
    for odd in ("x", "0", "-1", str(2**63)):
        answer = api.post(f"{PATH}/{odd}/notes", {"note": "x"}, key)
        assert refused(answer) == (400, "InvalidModerationEventID")


def test_addresses_go_after_a_month_and_are_found_all_the_same(api: Api) -> None:
    ask_badly(api, make_flagged()[1])
    age_events(29.9)
    expire(api)
    assert list_events(api)[0]["ipaddr"] == ADDRESS
    age_events(0.2)
    expire(api)
    (event,) = list_events(api)
    assert (event["ipaddr"], event["text"]) == (None, "waiting")
    assert list_events(api, ipaddr=ADDRESS) == [event]


def test_after_a_year_nothing_names_anybody_and_the_text_is_gone(api: Api) -> None:
    ask_badly(api, make_flagged()[1])
    evidence.store_evidence()
    (event,) = list_events(api)
    api.post(f"{PATH}/{event['id']}/notes", {"note": "Known by name"}, make_moderator()[1])
    assert len(list_objects()) >= 1
    age_events(366)
    expire(api)
    (event,) = list_events(api)
    for name in ("user_id", "proxied_account", "ipaddr", "ip_subject_key", "prompts", "worker_id"):
        assert event[name] is None
    assert (event["is_anonymised"], event["notes"], event["text"]) == (True, [], "deleting")
    key = f"{get_rows()[0].object_id}_evidence.json"
    let_deletions_be_due()
    expire(api)
    assert key not in list_objects()
    assert list_events(api)[0]["text"] == "deleted"


def test_the_text_may_go_before_the_rest(service_urls: ServiceAddresses, api: Api) -> None:
    del api
    with own_api(service_urls, "evidence_short", evidence_text_days=7) as other:
        user_id, key = make_flagged()
        ask_badly(other, key)
        age_events(8)
        expire(other)
        (event,) = list_events(other)
        assert (event["text"], event["prompts"], event["user_id"]) == ("deleting", None, user_id)
        assert get_rows()[0].prompts is None


def test_an_erased_account_is_taken_off_its_evidence(api: Api) -> None:
    user_id, key = make_flagged()
    ask_badly(api, key)
    evidence.store_evidence()
    api.delete(f"/users/{user_id}", key)
    let_rest(user_id, 31)
    assert api.delete(f"/users/{user_id}", key).json == {"message": "OK"}
    (event,) = list_events(api)
    assert (event["user_id"], event["ipaddr"], event["prompts"]) == (None, None, None)
    assert event["is_anonymised"] is True
    assert list_events(api, user_id=user_id) == []
    let_deletions_be_due()
    expire(api)
    assert f"{get_rows()[0].object_id}_evidence.json" not in list_objects()


def test_an_erased_owners_worker_is_taken_off_what_it_reported(api: Api) -> None:
    owner_id, key = make_user()
    asker_id, asker = make_flagged()
    worker_id = make_worker(owner_id)
    ask_badly(api, asker)
    with transaction() as session:
        session.execute(update(ModerationEvent).values(worker_id=worker_id))
    api.delete(f"/users/{owner_id}", key)
    let_rest(owner_id, 31)
    api.delete(f"/users/{owner_id}", key)
    (event,) = list_events(api)
    assert (event["worker_id"], event["user_id"]) == (None, asker_id)


def test_while_the_store_is_away_texts_wait_and_lists_say_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable

    ask_badly(api, make_flagged()[1])
    with monkeypatch.context() as patched:
        patched.setattr(r2, "put_object", fail)
        evidence.store_evidence()
    assert list_events(api)[0]["text"] == "waiting"
    evidence.store_evidence()
    with monkeypatch.context() as patched:
        patched.setattr(r2, "get_object", fail)
        (event,) = list_events(api)
        assert (event["text"], event["prompts"]) == ("unavailable", None)
    assert list_events(api)[0]["prompts"] is not None


@pytest.mark.race
def test_a_text_that_goes_while_it_is_stored_leaves_no_object(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_id, key = make_flagged()
    ask_badly(api, key)
    api.delete(f"/users/{user_id}", key)
    let_rest(user_id, 31)
    put = r2.put_object

    def erase_then_put(*arguments: Any, **options: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(api.delete, f"/users/{user_id}", key).result().status_code == 200
        put(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(r2, "put_object", erase_then_put)
        evidence.store_evidence()
    (row,) = get_rows()
    assert (row.text_state, row.prompts) == ("deleting", None)
    expire(api)
    assert get_rows()[0].text_state == "deleting"  # whoever stores it may not have ended yet
    let_deletions_be_due()
    expire(api)
    assert f"{row.object_id}_evidence.json" not in list_objects()


def test_the_limits_count_by_key_whatever_the_path(service_urls: ServiceAddresses) -> None:
    with own_api(service_urls, "evidence_limits", rate_limits_enabled=True) as limited:
        redis_ctrl.call(redis_ctrl.limiter_db, lambda client: client.flushdb())
        _, key = make_moderator()
        for number in range(30):
            answer = limited.post(f"{PATH}/{number + 1}/notes", {"note": "x"}, key)
            assert answer.status_code == 404
        assert limited.post(f"{PATH}/77/notes", {"note": "x"}, key).status_code == 429
        codes = [limited.get(PATH, key).status_code for _ in range(121)]
        assert codes == [200] * 120 + [429]
        assert limited.get(PATH, make_moderator()[1]).status_code == 200


def test_a_report_never_fails_the_submit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ServiceUnavailable("The database is away.")

    owner_id, owner = make_user(UserRoleTypes.TRUSTED)
    api.post("/generate/text/async", {"prompt": "Tell me", "models": [KNOWN]}, make_user()[1])
    pop = {"name": f"reporter {owner_id}", "models": [KNOWN], "max_context_length": 4096}
    job = api.post("/generate/text/pop", pop, owner).json
    monkeypatch.setattr(evidence, "keep_event", fail)
    reply = {"id": job["id"], "generation": "x", "state": "csam"}
    assert api.post("/generate/text/submit", reply, owner).status_code == 200
    assert list_events(api) == []


def test_whoever_waits_for_a_reported_reply_is_told_before_it_is_kept(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    owner_id, owner = make_user(UserRoleTypes.TRUSTED)
    queued = {"prompt": "Tell me", "models": [KNOWN], "webhook": "https://hook.invalid/"}
    api.post("/generate/text/async", queued, make_user()[1])
    pop = {"name": f"reporter {owner_id}", "models": [KNOWN], "max_context_length": 4096}
    job = api.post("/generate/text/pop", pop, owner).json
    monkeypatch.setattr(settle_jobs, "queue_webhook", lambda *_: steps.append("told"))
    monkeypatch.setattr(evidence, "keep_event", lambda *_, **__: steps.append("kept"))
    reply = {"id": job["id"], "generation": "x", "state": "csam"}
    assert api.post("/generate/text/submit", reply, owner).status_code == 200
    assert steps == ["told", "kept"]


def test_events_are_listed_in_few_statements_however_many_there_are(api: Api) -> None:
    moment = utcnow()
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO moderation_events (created, reason, models, is_chat, is_anonymised,"
                " text_state, text_changed, object_id) SELECT :now, 'model_rejection', '[]', false,"
                " false, 'none', :now, gen_random_uuid() FROM generate_series(1, 300)"
            ),
            {"now": moment},
        )
    page = list_events(api, limit=100)
    assert len(page) == 100
    older = list_events(api, limit=100, before_id=page[-1]["id"])
    assert page[-1]["id"] - older[0]["id"] == 1
