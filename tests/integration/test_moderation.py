# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whose texts the replacement filter rewrites, with rules read from a real database."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, Table, create_engine, event
from sqlalchemy.orm import Session

from devtools.services import ServiceAddresses
from horde import model_reference
from horde.classes.base.stats import Filter
from horde.database import caches, moderation
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode
from tests.services import make_database

ORDINARY, ADULT = "ordinary-model", "adult-model"


@pytest.fixture(scope="module")
def engine(service_urls: ServiceAddresses) -> Iterator[Engine]:
    """A database of filters only."""
    url = make_database(service_urls.database_url, "moderation")
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://", 1))
    assert isinstance(Filter.__table__, Table)
    Filter.__table__.create(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose rows vanish, beside a reference of two models and a process that remembers no
    rules.
    """
    monkeypatch.setattr(
        model_reference.state.get(),
        "models",
        {ORDINARY: model_reference.TextModel(1), ADULT: model_reference.TextModel(1, nsfw=True)},
    )
    caches.clear_all()
    with Session(engine) as session:
        yield session
    caches.clear_all()


@pytest.fixture
def statements(engine: Engine) -> Iterator[list[str]]:
    """The statements sent while the test runs."""
    sent: list[str] = []

    def record(*arguments: object) -> None:
        sent.append(str(arguments[2]))

    event.listen(engine, "before_cursor_execute", record)
    yield sent
    event.remove(engine, "before_cursor_execute", record)


def add_rule(
    session: Session, expression: str, replacement: str = "", filter_type: int = 10
) -> None:
    session.add(Filter(regex=expression, filter_type=filter_type, replacement=replacement))
    session.flush()


def rewrite(
    session: Session, prompt: str, *, is_flagged: bool = False, models: tuple[str, ...] = ()
) -> str | None:
    rewrite_text = moderation.find_prompt_rewrite(
        session, is_flagged=is_flagged, models=models, prompt=prompt
    )
    return None if rewrite_text is None else rewrite_text(prompt)


def test_ordinary_requests_are_left_alone_without_a_statement(
    session: Session, statements: list[str]
) -> None:
    assert rewrite(session, "a child, a dog", models=(ORDINARY, "unknown")) is None
    assert rewrite(session, "a child, a dog") is None
    assert statements == []


def test_rules_are_read_once(session: Session, statements: list[str]) -> None:
    for _ in range(3):
        rewrite(session, "anything", is_flagged=True)
    assert len(statements) == 1


def test_flagged_users_are_always_rewritten(session: Session) -> None:
    add_rule(session, "dog", "cat")
    add_rule(session, "cat", "bird")
    assert rewrite(session, "A dog, (asleep:1.1)!", is_flagged=True) == "A bird asleep"
    assert rewrite(session, "no match", is_flagged=True) == "no match"


def test_adult_models_are_rewritten_for_a_word_of_the_lists(session: Session) -> None:
    assert rewrite(session, "C-h-i-l-d of nine", models=(ORDINARY, ADULT)) == "adult of nine"
    assert rewrite(session, "Adults: only.", models=(ADULT,)) is None


def test_adult_models_are_rewritten_for_a_rule(session: Session) -> None:
    add_rule(session, r"\bdog\b", "cat")
    assert rewrite(session, "One D.O.G!", models=(ADULT,)) == "One cat"
    assert rewrite(session, "One dogma!", models=(ADULT,)) is None


def test_only_replacement_rules_count(session: Session) -> None:
    add_rule(session, "dog", "cat", filter_type=11)
    add_rule(session, "dog", "cow", filter_type=20)
    assert rewrite(session, "dog", is_flagged=True) == "dog"


def test_a_rule_that_cannot_be_compiled_leaves_the_others_at_work(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    add_rule(session, "(", "x")
    add_rule(session, "a{99999999999999999999}", "x")
    add_rule(session, "dog", "cat")
    assert rewrite(session, "dog", is_flagged=True) == "cat"
    assert [record.getMessage() for record in caplog.records] == ["horde.filter.invalid"] * 2


def test_a_prompt_too_long_to_screen_is_refused_only_where_it_is_screened(session: Session) -> None:
    prompt = "a" * (moderation.MAX_SCREENED_CHARACTERS + 1)
    assert rewrite(session, prompt, models=(ORDINARY,)) is None
    with pytest.raises(BadRequest) as refusal:
        rewrite(session, prompt, models=(ADULT,))
    assert refusal.value.rc == ReturnCode.CORRUPT_PROMPT


def test_the_longest_prompt_passes_our_own_rules(session: Session) -> None:
    prompt = ("Seven words of an ordinary kind, child. " * 60_000)[
        : moderation.MAX_SCREENED_CHARACTERS
    ]
    assert "adult" in (rewrite(session, prompt, models=(ADULT,)) or "")
