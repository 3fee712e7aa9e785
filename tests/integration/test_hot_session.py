# SPDX-License-Identifier: AGPL-3.0-or-later
"""The session of the hot statements does what SQLAlchemy's does: the same rows, one transaction,
the same failures.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from flask import Flask
from sqlalchemy import DateTime, bindparam, func, insert, literal, select, text, update
from sqlalchemy.exc import (
    DataError,
    IntegrityError,
    MultipleResultsFound,
    NoResultFound,
    ProgrammingError,
)
from sqlalchemy.orm import sessionmaker

from devtools.services import ServiceAddresses
from horde import db
from horde.apis.v2 import kobold
from horde.classes.base.user import User
from horde.classes.base.worker import WorkerModel
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextWorker
from horde.db import execute_later, reading, single_statement, table_of, transaction
from horde.hot_session import HotSession, keep, keep_insert
from tests.integration.rows import make_job, make_request, make_user, make_worker, own_horde
from tests.integration.statements import noting_statements


class Abandoned(Exception):
    """A caller that fails in the middle of a transaction."""


requests, jobs = table_of(TextWaitingPrompt), table_of(TextProcessingGeneration)
workers, offers = table_of(TextWorker), table_of(WorkerModel)

READ_REQUEST = keep(select(*requests.c).where(requests.c.id == bindparam("id")))
READ_JOB = keep(select(*jobs.c).where(jobs.c.id == bindparam("id")))
READ_WORKER = keep(select(*workers.c).where(workers.c.id == bindparam("id")))
SET_N = keep(
    update(requests)
    .where(requests.c.id == bindparam("wp_id"), requests.c.n > literal(0, literal_execute=True))
    .values(n=bindparam("new_n"))
    .returning(requests.c.n, requests.c.id)
)
SAY: Any = keep(select(bindparam("word").label("word"), func.count().label("count")))
THREE = keep(text("SELECT generate_series(1, 3) AS number"))


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "hot_session", (kobold,)) as app:
        yield app


@pytest.fixture
def request_id(app: Flask) -> UUID:
    owner, _ = make_user()
    return make_request(
        owner,
        n=3,
        is_chat=True,
        messages=[{"role": "user", "content": "naïve 漢字"}],
        chat_extras={"stream": True},
        chat_required_features=["seed"],
        gen_payload={"a": 1.5},
        kudos=7.25,
    )


def read_as_sqlalchemy_does(statement: Any, **values: Any) -> Any:
    with sessionmaker(db.require_engine())() as session:
        return session.execute(statement, values).one()._mapping


@pytest.mark.parametrize("statement", [READ_REQUEST, READ_JOB, READ_WORKER])
def test_rows_have_the_values_that_sqlalchemy_reads(request_id: UUID, statement: Any) -> None:
    owner, _ = make_user()
    worker_id = make_worker(owner, last_check_in=datetime(2026, 1, 2, 3, 4, 5))
    job_id = make_job(request_id, worker_id, gen_metadata=[{"type": "x"}], message={"z": 1, "a": 2})
    wanted = {id(READ_REQUEST): request_id, id(READ_JOB): job_id, id(READ_WORKER): worker_id}
    values = {"id": wanted[id(statement)]}
    expected = dict(read_as_sqlalchemy_does(statement, **values))
    with transaction() as session:
        row = session.execute(statement, values).one()
    assert dict(row._mapping) == expected
    assert [type(value) for value in row] == [type(value) for value in expected.values()]
    assert row.id == row[0] == values["id"]


def test_an_insert_writes_what_sqlalchemy_writes(request_id: UUID) -> None:
    """Columns that were not named have the defaults of their class."""
    owner, _ = make_user()
    worker_id = make_worker(owner)
    named = {"procgen_type": "text", "wp_id": request_id, "worker_id": worker_id, "model": "m"}
    first, second = uuid4(), uuid4()
    with transaction() as session:
        session.execute(keep_insert(jobs, ("id", *named)), {"id": first, **named})
    with sessionmaker(db.require_engine())() as other:
        other.execute(insert(jobs), {"id": second, **named})
        other.commit()
    kept = dict(read_as_sqlalchemy_does(READ_JOB, id=first))
    usual = dict(read_as_sqlalchemy_does(READ_JOB, id=second))
    for column in ("id", "created", "start_time"):
        assert kept.pop(column) is not None
        usual.pop(column)
    assert kept == usual


def test_an_update_answers_with_what_it_wrote(request_id: UUID) -> None:
    with transaction() as session:
        row = session.execute(SET_N, {"wp_id": request_id, "new_n": 0}).one_or_none()
    assert row is not None
    assert (row.n, row.id) == (0, request_id)
    with transaction() as session:
        assert session.execute(SET_N, {"wp_id": request_id, "new_n": 5}).one_or_none() is None


@pytest.mark.parametrize("word", ["100%", "%(word)s", "it's; DROP TABLE users", "{}", None])
def test_parameters_stay_parameters(app: Flask, word: str | None) -> None:
    with transaction() as session:
        assert session.execute(SAY, {"word": word}).one().word == word
        assert session.scalar(SAY, {"word": word}) == word


def test_results_have_the_words_of_sqlalchemy(app: Flask) -> None:
    with reading() as session:
        assert session.scalars(THREE).all() == [1, 2, 3]
        assert [row.number for row in session.execute(THREE)] == [1, 2, 3]
        assert session.execute(THREE).first() == (1,)
        with pytest.raises(MultipleResultsFound):
            session.execute(THREE).one()
        with pytest.raises(NoResultFound):
            session.execute(READ_JOB, {"id": uuid4()}).one()
        assert session.scalar(READ_JOB, {"id": uuid4()}) is None


def test_kept_statements_and_mapped_classes_share_a_transaction(request_id: UUID) -> None:
    def change_and_fail() -> None:
        with transaction() as session:
            session.get_one(TextWaitingPrompt, request_id).n = 9  # mapped, and not flushed yet
            assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 9
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change_and_fail()
    with transaction() as session:
        assert session.get_one(TextWaitingPrompt, request_id).n == 3
        session.execute(SET_N, {"wp_id": request_id, "new_n": 8})
        assert session.scalar(select(requests.c.n).where(requests.c.id == request_id)) == 8
        session.add(user := User(username="somebody", oauth_id=f"test_{uuid4().hex}", api_key=""))
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 8
        assert session.get_one(User, user.id).username == "somebody"


@pytest.mark.parametrize("failing", ["kept", "core", "mapped", "own"])
def test_whatever_fails_the_transaction_leaves_nothing(request_id: UUID, failing: str) -> None:
    duplicate = {"id": request_id, "wp_type": "text", "prompt": "", "user_id": -1}

    def change_and_fail() -> None:
        with transaction() as session:
            session.execute(SET_N, {"wp_id": request_id, "new_n": 1})
            if failing == "kept":
                session.execute(keep(text("SELECT nothing FROM nowhere")))
            if failing == "core":
                session.execute(insert(requests), duplicate)
            if failing == "mapped":
                session.add(TextWaitingPrompt(id=request_id, user_id=-1, prompt=""))
                session.flush()
            raise Abandoned

    errors = {"kept": ProgrammingError, "own": Abandoned}
    with pytest.raises(errors.get(failing, IntegrityError)):
        change_and_fail()
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 3


@pytest.mark.parametrize("comes_next", ["commit", "kept", "core", "mapped", "savepoint"])
def test_what_was_sent_later_fails_the_transaction_that_it_belongs_to(
    request_id: UUID, comes_next: str
) -> None:
    def change_and_go_on() -> None:
        with transaction() as session:
            execute_later(session, SET_N, {"wp_id": request_id, "new_n": 1})
            duplicate = {"id": request_id, "wp_type": "text", "prompt": "secret", "user_id": -1}
            execute_later(session, keep_insert(requests, tuple(duplicate)), duplicate)
            if comes_next == "kept":
                session.execute(READ_REQUEST, {"id": request_id})
            if comes_next == "core":
                session.execute(select(literal(1)))
            if comes_next == "mapped":
                session.get_one(TextWaitingPrompt, request_id)
            if comes_next == "savepoint":
                session.begin_nested()

    with pytest.raises(IntegrityError) as failed:
        change_and_go_on()
    assert "secret" not in str(failed.value)
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 3


def test_a_connection_whose_statement_failed_is_used_again(request_id: UUID) -> None:
    ask = keep(text("SELECT pg_backend_pid()"))

    def fail(*, later: bool) -> None:
        with transaction() as session:
            session.execute(ask, {})
            fails = keep(text("SELECT 1 / :number"))
            if later:
                execute_later(session, fails, {"number": 0})
            else:
                session.execute(fails, {"number": 0})

    with transaction() as session:
        before = session.execute(ask, {}).scalar_one()
    for later in (False, True):
        with pytest.raises(DataError):
            fail(later=later)
        with transaction() as session:
            assert session.execute(ask, {}).scalar_one() == before


def test_what_waits_is_forgotten_with_its_transaction(request_id: UUID) -> None:
    def change_and_fail() -> None:
        with transaction() as session:
            execute_later(session, SET_N, {"wp_id": request_id, "new_n": 1})
            raise Abandoned

    with pytest.raises(Abandoned):
        change_and_fail()
    with single_statement() as session:
        execute_later(session, SET_N, {"wp_id": request_id, "new_n": 5})
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 5


def test_a_transaction_with_a_failed_statement_is_never_taken_for_committed(
    request_id: UUID,
) -> None:
    def change_and_go_on() -> None:
        with transaction() as session:
            session.execute(SET_N, {"wp_id": request_id, "new_n": 1})
            with suppress(ProgrammingError):
                session.execute(keep(text("SELECT nothing FROM nowhere")))

    with pytest.raises(RuntimeError):
        change_and_go_on()
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 3


def test_a_savepoint_that_was_rolled_back_leaves_the_transaction(request_id: UUID) -> None:
    with transaction() as session:
        session.execute(SET_N, {"wp_id": request_id, "new_n": 2})
        with pytest.raises(IntegrityError), session.begin_nested():
            session.execute(
                keep_insert(offers, ("worker_id", "model")), {"worker_id": uuid4(), "model": "m"}
            )
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 2
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 2


def test_a_connection_given_back_is_in_no_transaction(request_id: UUID) -> None:
    state = text(
        "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        " AND datname = current_database()"
    )
    with transaction() as session:
        session.execute(SET_N, {"wp_id": request_id, "new_n": 2})

    def read_and_fail() -> None:
        with transaction() as session:
            session.execute(READ_REQUEST, {"id": request_id})
            raise Abandoned

    with pytest.raises(Abandoned):
        read_and_fail()
    with transaction():
        pass  # nothing was asked, so nothing was begun
    sessions = db.state.get().sessions
    assert sessions is not None
    with sessions() as forgotten:
        forgotten.execute(SET_N, {"wp_id": request_id, "new_n": 7})
    with sessionmaker(db.require_engine())() as session, session.begin():
        assert session.scalar(state) == 0


def test_a_transaction_begins_with_its_first_statement_and_reads_with_none(
    request_id: UUID,
) -> None:
    sent: list[list[str]] = []
    original = HotSession._run

    def note(self: HotSession, connection: Any, *words: Any) -> Any:
        cursor = original(self, connection, *words)
        sent.append([part.split()[0].decode() for part in cursor.query.split(b"; ")])
        return cursor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HotSession, "_run", note)
        with transaction() as session:
            session.execute(READ_REQUEST, {"id": request_id})
            session.execute(READ_REQUEST, {"id": request_id})
        assert sent == [["BEGIN", "SELECT"], ["SELECT"], ["COMMIT"]]
        sent.clear()
        with reading() as session:
            session.execute(READ_REQUEST, {"id": request_id})
        assert sent == [["SELECT"]]
        sent.clear()
        with transaction() as session:
            execute_later(session, SET_N, {"wp_id": request_id, "new_n": 6})
            assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 6
            execute_later(session, SET_N, {"wp_id": request_id, "new_n": 4})
        assert sent == [["BEGIN", "UPDATE", "SELECT"], ["UPDATE", "COMMIT"]]
    with transaction() as session:
        assert session.execute(READ_REQUEST, {"id": request_id}).one().n == 4


def test_who_counts_statements_sees_kept_ones_too(request_id: UUID) -> None:
    with noting_statements() as seen, transaction() as session:
        session.execute(READ_REQUEST, {"id": request_id})
        session.execute(select(literal(1)))
    assert [statement.split()[0] for statement in seen] == ["SELECT", "SELECT"]


def test_a_statement_derived_from_a_kept_one_is_its_own(request_id: UUID) -> None:
    derived = READ_REQUEST.where(requests.c.n > bindparam("least", type_=requests.c.n.type))
    with transaction() as session:
        assert session.execute(derived, {"id": request_id, "least": 5}).first() is None
        assert session.execute(READ_REQUEST, {"id": request_id}).first() is not None


def test_moments_and_nulls_travel_both_ways(app: Flask) -> None:
    moment = datetime(2026, 5, 6, 7, 8, 9, 123456)
    echo = keep(
        select(bindparam("moment", type_=DateTime).label("moment"), literal(None).label("nothing"))
    )
    with transaction() as session:
        assert tuple(session.execute(echo, {"moment": moment}).one()) == (moment, None)
