# SPDX-License-Identifier: AGPL-3.0-or-later
"""What `POST /generate/text/async` accepts, refuses, in which order, and what it leaves behind."""

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask
from sqlalchemy import insert, select, text

from devtools.services import ServiceAddresses
from horde import limiter, redis_ctrl
from horde.classes.base.kudos import KudosReservation
from horde.classes.base.stats import Filter, HordeSettings
from horde.classes.base.user import ANONYMOUS_ID, UserRoleTypes
from horde.classes.base.waiting_prompt import WaitingPrompt, WPAllowedWorkers, WPModels
from horde.classes.kobold.pricing import compute_text_quote, round_quote
from horde.database import addresses
from horde.db import transaction
from horde.model_reference import get_text_model_multiplier
from tests.integration.rows import empty_tables, make_user, make_worker
from tests.integration.text_horde import (
    ADULT,
    KNOWN,
    TextHorde,
    count_rows,
    forget_copies,
    forget_postings,
    get_request,
    get_shared_key,
    list_holds,
    list_postings,
    make_shared_key,
    minutes_ago,
    own_text_horde,
    refused,
    start_clean,
)

RICH = 1_000_000


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_requests") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


def set_modes(**modes: bool) -> None:
    with transaction() as session:
        session.add(HordeSettings(id=1, **modes))
    forget_copies()


def serve(**columns: Any) -> None:
    """Let somebody serve KNOWN."""
    user_id, _ = make_user(UserRoleTypes.TRUSTED)
    make_worker(
        user_id,
        (KNOWN,),
        **{"max_length": 16384, "max_context_length": 8192, "speed": 20.0} | columns,
    )
    forget_copies()


def test_an_accepted_request_answers_its_id_and_its_quote(horde: TextHorde) -> None:
    serve()
    answer = horde.ask(models=[KNOWN], params={"max_length": 100})
    quote = compute_text_quote(
        max_length=100,
        max_context_length=2048,
        models=[(get_text_model_multiplier(KNOWN), True)],
        n=1,
    )
    assert answer.status_code == 202
    assert answer.json == {"id": answer.json["id"], "kudos": round_quote(quote)}
    assert isinstance(answer.json["kudos"], int)


def test_a_request_nobody_serves_is_accepted_with_a_warning(horde: TextHorde) -> None:
    answer = horde.ask(models=[KNOWN])
    assert answer.status_code == 202
    assert answer.json["message"].startswith(
        "Warning: No available workers can fulfill this request. It will expire in 20 minutes."
    )


def test_no_warning_is_sent_in_a_raid(horde: TextHorde) -> None:
    set_modes(raid=True)
    assert "message" not in horde.ask(models=[KNOWN]).json


def test_the_row_holds_what_was_asked(horde: TextHorde) -> None:
    user_id, key = make_user()
    worker = make_worker(user_id, (KNOWN,))
    request_id = horde.queue(
        key,
        headers={"Client-Agent": "tests:1:nobody"},
        models=[KNOWN, "other/model", KNOWN],
        params={
            "n": 2,
            "max_length": 64.0,
            "max_context_length": 1024,
            "temperature": 1,
            "quiet": True,
            "top_p": None,
        },
        workers=[str(worker)],
        worker_blacklist=True,
        trusted_workers=True,
        validated_backends=None,
        slow_workers=True,
        webhook="https://example.org/hook",
        softprompt="ignored",
        quiet=True,
        cluster="x",
    )
    row = get_request(request_id)
    assert (row.n, row.jobs, row.max_length, row.max_context_length, row.things) == (
        2,
        2,
        64,
        1024,
        64,
    )
    assert (
        row.trusted_workers,
        row.validated_backends,
        row.slow_workers,
        row.worker_blacklist,
    ) == (True, False, True, True)
    assert (row.active, row.faulted, row.is_chat, row.user_id, row.softprompt) == (
        True,
        False,
        False,
        user_id,
        "ignored",
    )
    assert (row.client_agent, row.webhook, row.consumed_kudos) == (
        "tests:1:nobody",
        "https://example.org/hook",
        1,
    )
    assert row.params == {"n": 2, "max_length": 64, "max_context_length": 1024, "temperature": 1}
    assert row.expiry - row.created == timedelta(minutes=20)
    with transaction() as session:
        assert list(session.scalars(select(WPModels.model).order_by(WPModels.id))) == [
            KNOWN,
            "other/model",
        ]
        assert list(session.scalars(select(WPAllowedWorkers.worker_id))) == [worker]


def test_validated_backends_is_false_when_left_out(horde: TextHorde) -> None:
    assert get_request(horde.queue()).validated_backends is False


def test_the_tax_is_one_kudos_and_never_more(horde: TextHorde) -> None:
    forget_postings()
    user_id, key = make_user()
    horde.queue(key, params={"n": 3})
    assert list_postings(user_id) == [Decimal(-1)]


@pytest.mark.parametrize(("kudos", "roles", "priority"), [
    (1234, (), 1234),
    (5_000_000_000, (), 2**31 - 1),
    (5000, (UserRoleTypes.FLAGGED,), 5),
    (10, (UserRoleTypes.FLAGGED,), -100),
])  # fmt: skip
def test_the_starting_priority_is_the_balance(
    horde: TextHorde, kudos: int, roles: tuple[UserRoleTypes, ...], priority: int
) -> None:
    _, key = make_user(*roles, kudos=kudos)
    assert get_request(horde.queue(key)).extra_priority == priority


# Shapes


NUL, SURROGATE = b'{"prompt": "a\\u0000"}', b'{"prompt": "a\\ud800"}'


@pytest.mark.parametrize(("body", "rc"), [
    (NUL, "NulByteInPayload"),
    (b'{"prompt": "a", "params": {"stop_sequence": ["\\u0000"]}}', "NulByteInPayload"),
    (b'{"prompt": "a", "\\u0000": 1}', "NulByteInPayload"),
    (SURROGATE, "InvalidPromptEncoding"),
    (b'{"prompt": "a", "params": {"temperature": NaN}}', "BadRequest"),
    (b'{"prompt": "a", "params": {"temperature": Infinity}}', "BadRequest"),
    (b'{"prompt": "a", "params": {"n": 1e400}}', "BadRequest"),
    (b'{"prompt": "a", "params": {"max_length": ' + b"9" * 5000 + b"}}", "BadRequest"),
    (b'{"prompt": "a", "params": {"max_length": ' + b"9" * 200 + b"}}", "BadRequest"),
    (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "BadRequest"),
    (b'{"prompt": "\xff"}', "BadRequest"),
    (b"{", "BadRequest"),
    (b"", "BadRequest"),
    (b"[]", "BadRequest"),
    (b"null", "BadRequest"),
    (b"{}", "BadRequest"),
    (b'{"prompt": null}', "BadRequest"),
    (b'{"prompt": 5}', "BadRequest"),
])  # fmt: skip
def test_a_hostile_body_is_refused_and_leaves_nothing(
    horde: TextHorde, body: bytes, rc: str
) -> None:
    assert refused(horde.post("async", body)) == (400, rc)
    assert count_rows(WaitingPrompt) == 0


@pytest.mark.parametrize(("params", "path"), [
    ({"n": 0}, "params.n"),
    ({"n": 21}, "params.n"),
    ({"n": 1.5}, "params.n"),
    ({"n": True}, "params.n"),
    ({"max_length": 15}, "params.max_length"),
    ({"max_length": 16385}, "params.max_length"),
    ({"max_length": "80"}, "params.max_length"),
    ({"max_context_length": 79}, "params.max_context_length"),
    ({"max_context_length": 1048577}, "params.max_context_length"),
    ({"temperature": 5.01}, "params.temperature"),
    ({"top_p": 0}, "params.top_p"),
    ({"top_k": 201}, "params.top_k"),
    ({"rep_pen": 0.9}, "params.rep_pen"),
    ({"rep_pen_range": 4097}, "params.rep_pen_range"),
    ({"dynatemp_exponent": -1}, "params.dynatemp_exponent"),
    ({"singleline": 1}, "params.singleline"),
    ({"stop_sequence": "x"}, "params.stop_sequence"),
    ({"stop_sequence": [1]}, "params.stop_sequence"),
    ({"sampler_order": ["a"]}, "params.sampler_order"),
])  # fmt: skip
def test_a_param_out_of_range_is_named(horde: TextHorde, params: dict[str, Any], path: str) -> None:
    answer = horde.ask(params=params)
    assert refused(answer) == (400, "BadRequest")
    assert answer.json["message"] == "Input payload validation failed"
    assert list(answer.json["errors"]) == [path]
    assert count_rows(WaitingPrompt) == 0


@pytest.mark.parametrize(("key", "value"), [
    ("params", []),
    ("models", "x"),
    ("models", [1]),
    ("models", ["x" * 256]),
    ("softprompt", ""),
    ("trusted_workers", "yes"),
    ("slow_workers", 1),
    ("nsfw", "no"),
    ("workers", "id"),
    ("dry_run", 0),
    ("webhook", "https://" + "x" * 1024),
    ("style", "ab"),
    ("proxied_account", 5),
])  # fmt: skip
def test_a_key_of_the_wrong_shape_is_named(horde: TextHorde, key: str, value: Any) -> None:
    answer = horde.ask(**{key: value})
    assert refused(answer) == (400, "BadRequest")
    assert [path.split(".")[0] for path in answer.json["errors"]] == [key]


def test_a_missing_key_is_no_anonymous_request(horde: TextHorde) -> None:
    answer = horde.ask(None)
    assert refused(answer) == (400, "BadRequest")
    assert "apikey" in answer.json["errors"]


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "params",
        "workers",
        "softprompt",
        "webhook",
        "style",
        "dry_run",
        "nsfw",
        "trusted_workers",
        "slow_workers",
        "extra_source_images",
        "context_fit",
        "allow_downgrade",
        "disable_batching",
        "proxied_account",
        "worker_blacklist",
        "extra_slow_workers",
    ],
)
def test_null_is_the_same_as_absent(horde: TextHorde, name: str) -> None:
    assert horde.ask(**{name: None}).status_code == 202


def test_every_param_clients_are_known_to_send_is_accepted(horde: TextHorde) -> None:
    params = {
        "n": 1, "max_length": 16384, "max_context_length": 1048576, "temperature": 0, "top_p": 1,
        "top_k": 200, "top_a": 0,
        "typical": 1, "tfs": 1, "rep_pen": 1.1, "rep_pen_range": 4096, "rep_pen_slope": 0.7,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        "singleline": False, "frmtadsnsp": False, "frmtrmblln": True, "frmtrmspch": False,
        "frmttriminc": False,
        "stop_sequence": ["\n"], "use_default_badwordsids": False, "min_p": 0, "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "smoothing_factor": 0, "unknown_sampler": [1, {}],
    }  # fmt: skip
    serve(max_context_length=1048576)
    request_id = horde.queue(models=[KNOWN], params=params | {"max_length": 512})
    assert get_request(request_id).params == {
        key: value for key, value in params.items() if key != "unknown_sampler"
    } | {"max_length": 512}


# The order of the checks: each step breaks its own rule and every later one


def break_everything() -> dict[str, Any]:
    """A body that breaks each rule after the shape."""
    return {
        "prompt": "",
        "style": "no such style",
        "context_fit": "reject",
        "webhook": "http://example.org",
        "proxied_account": "somebody",
        "extra_source_images": [{}] * 6,
        "workers": [str(uuid4())],
        "disable_batching": True,
        "params": {
            "n": 2, "max_length": 600, "max_context_length": 512, "sampler_order": [0],
            "stop_sequence": [f"{number:050}" for number in range(129)],
        },
    }  # fmt: skip


def test_refusals_come_in_the_published_order(horde: TextHorde) -> None:
    set_modes(maintenance=True)
    deleted_id, deleted = make_user(UserRoleTypes.DELETED)
    empty = make_shared_key(deleted_id, kudos=0, expiry=minutes_ago(1))
    expired = make_shared_key(deleted_id, expiry=minutes_ago(1))
    _, plain = make_user(concurrency=1)
    worker = str(make_worker(make_user()[0]))
    body = break_everything()
    key = "no such key"

    def ask(*, without: tuple[str, ...] = (), **changes: Any) -> tuple[int, str | None]:
        for name in without:
            del body[name]
        body.update(changes)
        return refused(horde.post("async", body, key))

    assert ask() == (404, "StyleNotFound")
    assert ask(without=("style",)) == (400, "PromptExceedsContext")
    assert ask(without=("context_fit",)) == (400, "MaintenanceMode")
    empty_tables("settings")
    forget_copies()
    assert ask() == (400, "BadRequest")  # the webhook
    del body["webhook"]
    key = empty
    assert ask() == (403, "SharedKeyEmpty")
    key = expired
    assert ask() == (403, "SharedKeyExpired")
    key = "no such key"
    assert ask() == (401, "InvalidAPIKey")
    key = deleted
    assert ask() == (400, "OnlyServiceAccountProxy")
    assert ask(without=("proxied_account",)) == (403, "DeletedUser")
    key = plain
    assert ask() == (400, "TooManyExtraSourceImages")
    assert ask(extra_source_images=[{}] * 2) == (400, "MoreThanMinExtraSourceImage")
    assert ask(extra_source_images=[{}]) == (400, "MissingPrompt")
    assert ask(prompt="###") == (404, "WorkerNotFound")
    assert ask(workers=[worker]) == (400, "RequiresTrust")
    assert ask(disable_batching=False) == (429, "TooManyPrompts")
    addresses.set_address_timeout("127.0.0.1", 5)
    _, key = make_user(UserRoleTypes.FLAGGED)
    assert ask() == (403, "TimeoutIP")
    forget_timeouts()
    assert ask(prompt="...") == (400, "CorruptPrompt")
    assert ask(prompt="fine") == (400, "TokenOverflow")
    body["params"]["max_length"] = 512
    assert ask() == (400, "MissingFullSamplerOrder")
    body["params"]["sampler_order"] = list(range(7))
    assert ask() == (400, "TooManyStopSequences")
    body["params"]["stop_sequence"] = ["x" * 1000, "y" * 1001]
    assert ask() == (400, "ExcessiveStopSequence")
    body["params"]["stop_sequence"] = ["x"]
    assert ask() == (400, "InvalidExtraSourceImages")
    assert ask(extra_source_images=[], slow_workers=False) == (403, "NoEligibleWorker")
    assert count_rows(WaitingPrompt) == 0
    assert count_rows(KudosReservation) == 0


def forget_timeouts() -> None:
    redis_ctrl.call(redis_ctrl.address_timeout_db, lambda client: client.flushdb())


@pytest.mark.parametrize(
    "stops", [[str(number) for number in range(128)], ["x" * 2000], ["x"] * 500]
)
def test_stop_sequences_at_the_bounds_are_accepted_and_repeats_count_once(
    horde: TextHorde, stops: list[str]
) -> None:
    assert horde.ask(params={"stop_sequence": stops}).status_code == 202


def test_an_unknown_context_fit_is_refused(horde: TextHorde) -> None:
    assert refused(horde.ask(context_fit="truncate_oldest")) == (400, "BadRequest")


# Who asks


def test_a_user_key_in_upper_case_header_works(horde: TextHorde) -> None:
    _, key = make_user()
    assert horde.post("async", {"prompt": "a"}, None, APIKEY=key).status_code == 202


def test_a_service_may_name_a_proxied_account(horde: TextHorde) -> None:
    _, key = make_user(UserRoleTypes.SERVICE)
    assert get_request(horde.queue(key, proxied_account="somebody")).proxied_account == "somebody"


@pytest.mark.parametrize(
    "role", [UserRoleTypes.TRUSTED, UserRoleTypes.EDUCATION, UserRoleTypes.SERVICE]
)
def test_a_privileged_account_has_its_direct_address_whitelisted(
    horde: TextHorde, role: UserRoleTypes
) -> None:
    _, key = make_user(role)
    address = f"203.0.113.{role.value}"
    horde.queue(key, headers={"address": address})
    assert horde.app.extensions[limiter.EXTENSION].whitelist.holds_for_a_day(address)


def test_an_ordinary_account_has_no_address_whitelisted(horde: TextHorde) -> None:
    _, key = make_user()
    horde.queue(key, headers={"address": "203.0.113.99"})
    assert not horde.app.extensions[limiter.EXTENSION].whitelist.holds_for_a_day("203.0.113.99")


def test_a_trusted_user_may_disable_batching(horde: TextHorde) -> None:
    _, key = make_user(UserRoleTypes.TRUSTED)
    assert horde.ask(key, disable_batching=True, params={"n": 2}).status_code == 202


@pytest.mark.parametrize(
    "worker",
    [
        "no uuid",
        "",
        "{12345678-1234-1234-1234-123456789012}",
        "5e4f7a60-0000-4000-8000-000000000000",
    ],
)
def test_an_unknown_listed_worker_is_named(horde: TextHorde, worker: str) -> None:
    answer = horde.ask(workers=[worker])
    assert refused(answer) == (404, "WorkerNotFound")
    assert worker in answer.json["message"]


def test_only_the_first_five_listed_workers_count(horde: TextHorde) -> None:
    user_id, _ = make_user()
    workers = [str(make_worker(user_id)) for _ in range(5)]
    request_id = horde.queue(workers=[*workers, "no worker"])
    assert count_rows(WPAllowedWorkers) == 5
    assert get_request(request_id).active


def test_an_empty_worker_list_is_no_restriction(horde: TextHorde) -> None:
    serve()
    assert "message" not in horde.ask(models=[KNOWN], workers=[], worker_blacklist=True).json


# Concurrency


def test_waiting_generations_count_against_the_allowance(horde: TextHorde) -> None:
    _, key = make_user(concurrency=3)
    horde.queue(key, params={"n": 2})
    answer = horde.ask(key, params={"n": 2})
    assert refused(answer) == (429, "TooManyPrompts")
    assert answer.json["message"].startswith("Parallel requests (")
    assert horde.ask(key).status_code == 202


def test_generations_in_flight_do_not_count(horde: TextHorde) -> None:
    _, key = make_user(concurrency=1)
    _, worker = make_user()
    horde.queue(key)
    horde.take_job(worker)
    assert horde.ask(key).status_code == 202


def test_cancelled_requests_do_not_count(horde: TextHorde) -> None:
    _, key = make_user(concurrency=1)
    horde.cancel(horde.queue(key))
    assert horde.ask(key).status_code == 202


def test_anonymous_counts_by_the_models_it_asks_for(horde: TextHorde) -> None:
    for _ in range(25):
        horde.queue(models=["crowded"], params={"n": 20})
    answer = horde.ask(models=["crowded", "other"])
    assert refused(answer) == (429, "TooManyPrompts")
    assert "egister" in answer.json["message"]
    assert horde.ask(models=["other"]).status_code == 202
    assert refused(horde.ask()) == (429, "TooManyPrompts")


# Kudos


def test_output_within_the_allowance_needs_no_hold(horde: TextHorde) -> None:
    serve()
    horde.queue(models=[KNOWN], params={"max_length": 4096, "max_context_length": 8192})
    assert list_holds() == []


def test_output_above_the_allowance_holds_kudos(horde: TextHorde) -> None:
    serve()
    _, key = make_user(kudos=RICH)
    horde.queue(
        key,
        models=["unknown", KNOWN],
        params={"n": 2, "max_length": 4097, "max_context_length": 8192},
    )
    estimate = round(4097 * get_text_model_multiplier(KNOWN) / 21, 2) * 2
    assert list_holds() == [(Decimal(str(round(estimate, 2))), True)]


def test_kudos_that_are_not_there_are_not_held(horde: TextHorde) -> None:
    serve()
    _, key = make_user(kudos=100)
    answer = horde.ask(key, models=[KNOWN], params={"max_length": 4097, "max_context_length": 8192})
    assert refused(answer) == (403, "KudosUpfront")
    assert "4096" in answer.json["message"]
    assert (count_rows(WaitingPrompt), list_holds()) == (0, [])


def test_the_floor_of_an_account_cannot_be_held(horde: TextHorde) -> None:
    serve()
    _, key = make_user(kudos=25 + 19)
    assert refused(horde.ask(key, slow_workers=False)) == (403, "KudosUpfront")
    _, key = make_user(kudos=25 + 20)
    assert horde.ask(key, slow_workers=False).status_code == 202


def test_a_second_request_finds_the_first_ones_hold(horde: TextHorde) -> None:
    serve()
    _, key = make_user(kudos=25 + 39)
    assert horde.ask(key, slow_workers=False).status_code == 202
    assert refused(horde.ask(key, slow_workers=False)) == (403, "KudosUpfront")


def test_refusing_slow_workers_always_needs_a_hold(horde: TextHorde) -> None:
    serve()
    assert refused(horde.ask(models=[KNOWN], slow_workers=False)) == (403, "KudosUpfront")


def test_a_downgrade_lowers_the_output_and_takes_slow_workers(horde: TextHorde) -> None:
    serve()
    body = {
        "models": [KNOWN],
        "params": {"max_length": 5000, "max_context_length": 8192},
        "slow_workers": False,
    }
    row = get_request(horde.queue(allow_downgrade=True, **body))
    assert (row.max_length, row.slow_workers, row.things) == (4096, True, 4096)
    assert row.gen_payload["max_length"] == 4096
    assert list_holds() == []


def test_a_downgrade_never_raises_the_output(horde: TextHorde) -> None:
    serve()
    row = get_request(horde.queue(models=[KNOWN], slow_workers=False, allow_downgrade=True))
    assert (row.things, row.slow_workers) == (80, True)


def test_kudos_that_would_not_help_are_not_asked_for(horde: TextHorde) -> None:
    answer = horde.ask(models=[KNOWN], slow_workers=False)
    assert refused(answer) == (403, "NoEligibleWorker")
    assert set(answer.json) == {"message", "rc"}


def test_without_an_eligible_worker_the_allowance_is_the_floor(horde: TextHorde) -> None:
    assert horde.ask(models=[KNOWN], params={"max_length": 512}).status_code == 202
    assert refused(horde.ask(models=[KNOWN], params={"max_length": 513})) == (
        403,
        "NoEligibleWorker",
    )
    row = get_request(horde.queue(models=[KNOWN], params={"max_length": 513}, allow_downgrade=True))
    assert row.things == 512


def test_a_long_queue_shrinks_the_allowance(horde: TextHorde) -> None:
    serve()  # 20 tokens a second
    for _ in range(3):
        # 6000 tokens: 300 s.
        horde.queue(make_user()[1], models=[KNOWN], params={"n": 20, "max_length": 100})
    forget_copies()
    assert refused(horde.ask(models=[KNOWN], params={"max_length": 513})) == (403, "KudosUpfront")


# Shared keys


def test_a_shared_key_runs_as_its_owner_and_pays_along(horde: TextHorde) -> None:
    forget_postings()
    owner, _ = make_user(kudos=777)
    key = make_shared_key(owner, kudos=100, utilized=3)
    row = get_request(horde.queue(key))
    assert (row.user_id, row.extra_priority, str(row.sharedkey_id)) == (owner, 777, key)
    assert list_postings(owner) == [Decimal(-1)]
    assert (get_shared_key(key).kudos, get_shared_key(key).utilized) == (99, 4)


def test_an_unlimited_shared_key_is_never_decremented(horde: TextHorde) -> None:
    key = make_shared_key(make_user()[0], kudos=-1)
    horde.queue(key)
    assert (get_shared_key(key).kudos, get_shared_key(key).utilized) == (-1, 1)


def test_an_empty_shared_key_asks_as_anonymous_behind_everybody_when_it_may(
    horde: TextHorde,
) -> None:
    key = make_shared_key(make_user(kudos=50)[0], kudos=0)
    row = get_request(horde.queue(key, allow_downgrade=True))
    assert (row.user_id, row.extra_priority, row.sharedkey_id) == (ANONYMOUS_ID, -50, None)


def test_a_shared_key_of_a_style_is_refused(horde: TextHorde) -> None:
    owner, _ = make_user()
    key = make_shared_key(owner)
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO styles (id, style_type, name, prompt, params, user_id, sharedkey_id)"
                " VALUES (gen_random_uuid(), 'text', 'a style', '{p}', '{}', :owner, :key)"
            ),
            {"owner": owner, "key": key},
        )
    assert refused(horde.ask(key)) == (403, "SharedKeyAssignedStyles")


def test_a_shared_key_has_to_cover_the_estimate_even_within_the_allowance(horde: TextHorde) -> None:
    serve()
    key = make_shared_key(make_user(kudos=RICH)[0], kudos=19)
    assert refused(horde.ask(key)) == (403, "SharedKeyInsufficientKudos")
    row = get_request(horde.queue(key, allow_downgrade=True))
    assert (row.extra_priority, str(row.sharedkey_id)) == (-50, key)
    assert horde.ask(make_shared_key(make_user()[0], kudos=20)).status_code == 202


def test_a_shared_keys_limit_of_tokens_holds(horde: TextHorde) -> None:
    key = make_shared_key(make_user()[0], max_text_tokens=79)
    assert refused(horde.ask(key)) == (400, "BadRequest")
    assert horde.ask(key, params={"max_length": 79}).status_code == 202
    assert refused(horde.ask(make_shared_key(make_user()[0], max_text_tokens=0))) == (
        400,
        "BadRequest",
    )
    assert count_rows(WaitingPrompt) == 1


def test_a_refusal_for_a_keys_token_limit_takes_its_hold_back(horde: TextHorde) -> None:
    serve()
    key = make_shared_key(make_user(kudos=RICH)[0], kudos=-1, max_text_tokens=20)
    assert refused(horde.ask(key, models=[KNOWN], slow_workers=False)) == (400, "BadRequest")
    assert list_holds() == []


# Moderation


def test_a_prompt_is_stored_as_sent(horde: TextHorde) -> None:
    row = get_request(horde.queue(prompt="  Once, (upon:1.2) a  time ### no  "))
    assert row.prompt == "  Once, (upon:1.2) a  time ### no  "


def test_a_flagged_users_prompt_is_rewritten_and_kept_apart(horde: TextHorde) -> None:
    with transaction() as session:
        session.execute(
            insert(Filter), {"regex": "dragon", "filter_type": 10, "replacement": "lizard"}
        )
    forget_copies()
    _, key = make_user(UserRoleTypes.FLAGGED)
    request_id = horde.queue(key, prompt="A dragon.")
    with transaction() as session:
        stored = session.execute(
            select(WaitingPrompt.prompt, WaitingPrompt.submitted_prompt).where(
                WaitingPrompt.id == request_id
            )
        ).one()
        session.execute(text("TRUNCATE filters"))
    assert tuple(stored) == ("A lizard", "A dragon.")


def test_an_adult_model_keeps_the_prompt_among_adults(horde: TextHorde) -> None:
    row = get_request(horde.queue(models=[ADULT], prompt="She is 12 years old"))
    assert row.prompt == "She is adult"
    assert (
        get_request(horde.queue(models=[KNOWN], prompt="She is 12 years old")).prompt
        == "She is 12 years old"
    )


# context_fit


PROMPT = "x" * 3000  # 1000 tokens by the sizing estimate


def test_ignore_sends_a_long_prompt_unchanged(horde: TextHorde) -> None:
    row = get_request(horde.queue(prompt=PROMPT * 10))
    assert row.max_context_length == 2048


@pytest.mark.parametrize(("length", "status"), [(1048, 202), (1049, 400)])
def test_reject_refuses_what_does_not_fit(horde: TextHorde, length: int, status: int) -> None:
    serve()
    answer = horde.ask(
        models=[KNOWN], prompt=PROMPT, params={"max_length": length}, context_fit="reject"
    )
    assert answer.status_code == status
    assert answer.json.get("rc") == (None if status == 202 else "PromptExceedsContext")


@pytest.mark.parametrize(("bound", "length", "context"), [
    (8192, 1048, 2048),
    (8192, 1049, 4096),
    (3000, 1049, 3000),
    (2049, 1049, 2049),
])  # fmt: skip
def test_grow_takes_the_smallest_power_of_two_or_the_bound(
    horde: TextHorde, bound: int, length: int, context: int
) -> None:
    serve(max_context_length=bound)
    row = get_request(
        horde.queue(
            models=[KNOWN], prompt=PROMPT, params={"max_length": length}, context_fit="grow"
        )
    )
    assert (row.max_context_length, row.gen_payload["max_context_length"]) == (context, context)


def test_grow_beyond_every_worker_is_refused(horde: TextHorde) -> None:
    serve(max_context_length=2048)
    answer = horde.ask(
        models=[KNOWN], prompt=PROMPT, params={"max_length": 1049}, context_fit="grow"
    )
    assert refused(answer) == (400, "PromptExceedsContext")
    change_worker_offline()
    answer = horde.ask(
        models=[KNOWN], prompt=PROMPT, params={"max_length": 1049}, context_fit="grow"
    )
    assert refused(answer) == (400, "PromptExceedsContext")


def change_worker_offline() -> None:
    with transaction() as session:
        session.execute(
            text("UPDATE workers SET last_check_in = :then, max_context_length = 8192"),
            {"then": minutes_ago(6)},
        )
    forget_copies()


# Dry run


def test_a_dry_run_answers_the_quote_and_leaves_nothing(horde: TextHorde) -> None:
    serve()
    forget_postings()
    user_id, key = make_user(kudos=RICH)
    params = {"n": 2, "max_length": 5000, "max_context_length": 8192}
    answer = horde.ask(key, models=[KNOWN], params=params, dry_run=True)
    quote = compute_text_quote(
        max_length=5000,
        max_context_length=8192,
        models=[(get_text_model_multiplier(KNOWN), True)],
        n=2,
    )
    assert answer.status_code == 200
    assert answer.json == {
        "kudos": round_quote(quote),
        "resolved": {
            "prompt": "Once upon a time",
            "params": {"max_length": 5000, "max_context_length": 8192},
            "models": [KNOWN],
            "style": None,
            "estimated_prompt_tokens": 6,
            "context_fit": "ignore",
        },
    }
    assert (count_rows(WaitingPrompt), list_holds(), list_postings(user_id)) == (0, [], [])


def test_a_dry_run_is_refused_as_the_request_would_be(horde: TextHorde) -> None:
    serve()
    assert refused(horde.ask("no such key", dry_run=True)) == (401, "InvalidAPIKey")
    assert refused(horde.ask(models=[KNOWN], slow_workers=False, dry_run=True)) == (
        403,
        "KudosUpfront",
    )
    assert refused(horde.ask(prompt="", dry_run=True)) == (400, "MissingPrompt")


@pytest.mark.parametrize(
    ("models", "known"), [([], False), (["unknown/model"], False), ([KNOWN, "unknown/model"], True)]
)
def test_a_quote_follows_the_first_model(horde: TextHorde, models: list[str], known: bool) -> None:
    figures = [(get_text_model_multiplier(model), known) for model in models]
    quote = compute_text_quote(max_length=80, max_context_length=2048, models=figures, n=1)
    assert horde.ask(models=models, dry_run=True).json["kudos"] == round_quote(quote)
