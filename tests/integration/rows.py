# SPDX-License-Identifier: AGPL-3.0-or-later
"""A database and an application of a test module's own, and rows for it, committed for real."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from flask import Flask
from psycopg2.errors import DeadlockDetected
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from devtools.services import ServiceAddresses
from horde import db, r2, redis_ctrl
from horde.app import create_app
from horde.classes.base.user import User, UserRole, UserRoleTypes, hash_api_key
from horde.classes.base.waiting_prompt import WPModels
from horde.classes.base.worker import WorkerModel
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextWorker
from horde.config import Config
from horde.database import caches, users
from horde.database.migrate import migrate
from horde.db import transaction
from horde.postgres import waiting_up_to
from tests.services import make_database

SECRET = "salt of the tests"
# Of the database and of Redis: on a busy machine the product would do without them now and then.
ANSWER_SECONDS = 60.0
CLEANING_SECONDS = 120.0
CLEANING_ATTEMPTS = 10
serial = count(1)


@contextmanager
def own_horde(
    service_urls: ServiceAddresses, name: str, modules: tuple[Any, ...], **settings: Any
) -> Iterator[Flask]:
    """An application with the given resource modules on a migrated database of its own."""
    store = {
        "s3_endpoint": service_urls.s3_endpoint,
        "s3_access_key": service_urls.s3_access_key,
        "s3_secret_key": service_urls.s3_secret_key,
        "source_image_bucket": service_urls.bucket,
        "chat_messages_bucket": service_urls.bucket,
        "evidence_bucket": service_urls.bucket,
    }
    config = Config(
        database_url=make_database(service_urls.database_url, name).replace(
            "postgresql://", "postgresql+psycopg2://", 1
        ),
        redis_url=service_urls.redis_url,
        secret_key=SECRET,
        **{"rate_limits_enabled": False, "database_answer_seconds": ANSWER_SECONDS}
        | store
        | settings,
    )
    before, store_before = db.state.get(), r2.state.get()
    r2.state.set(r2.StoreState())  # the one of before stays open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_ctrl, "TIMEOUT_SECONDS", ANSWER_SECONDS)
        app = create_app(config, resource_modules=modules)
    engine = db.require_engine()
    migrate(engine, secret_key=SECRET)
    users.configure(config)
    try:
        yield app
    finally:
        engine.dispose()
        r2.disconnect()
        r2.state.set(store_before)
        db.state.set(before)


def forget_everything() -> None:
    """Empty the tables that tests of these modules write, the caches and Redis; accounts stay."""
    empty_tables(
        "waiting_prompts, workers, settings, teams, kudos_reservations, text_gen_stats,"
        " model_performances, horde_fulfillments"
    )
    for database in (redis_ctrl.cache_db, redis_ctrl.limiter_db, redis_ctrl.chat_signal_db):
        redis_ctrl.call(database, lambda client: client.flushdb())
    caches.clear_all()


def empty_tables(names: str) -> None:
    """Delete all rows of tables, and of those that refer to them.

    A request that the test before left may still hold rows. It is waited for, far longer than the
    product would wait, and when both wait for each other the statement is made again.
    """
    for _ in range(CLEANING_ATTEMPTS):
        try:
            with waiting_up_to(CLEANING_SECONDS), transaction() as session:
                session.execute(text(f"TRUNCATE {names} CASCADE"))
            return
        except DBAPIError as error:
            if not isinstance(error.orig, DeadlockDetected):
                raise
    raise AssertionError(f"{names} could not be emptied")


def make_user(*roles: UserRoleTypes, **columns: Any) -> tuple[int, str]:
    """An account with roles. Returns its id and its key."""
    number = next(serial)
    key = f"key of user {number}"
    with transaction() as session:
        user = User(
            **{
                "username": f"user {number}",
                "oauth_id": f"test_{number}",
                "api_key": hash_api_key(key, SECRET),
            }
            | columns,
            roles=[UserRole(user_role=role) for role in roles],
        )
        session.add(user)
        session.flush()
        return user.id, key


def make_worker(user_id: int, models: tuple[str, ...] = ("a/model",), **columns: Any) -> UUID:
    with transaction() as session:
        worker = TextWorker(**{"user_id": user_id, "name": f"worker {next(serial)}"} | columns)
        session.add(worker)
        session.flush()
        session.add_all(WorkerModel(worker_id=worker.id, model=model) for model in models)
        return worker.id


def make_chat_worker(user_id: int, model: str = "a/model", **columns: Any) -> UUID:
    declaration = {
        "accepts_chat_jobs": True,
        "chat_model_id": model,
        "chat_max_context_length": 8192,
        "chat_max_length": 1024,
        "chat_features": ["vision", "seed"],
        "image_transports": ["url", "base64"],
    }
    return make_worker(user_id, (model,), **declaration | columns)


def make_request(user_id: int, models: tuple[str, ...] = ("a/model",), **columns: Any) -> UUID:
    defaults = {
        "user_id": user_id,
        "prompt": "Once",
        "active": True,
        "n": 1,
        "jobs": 1,
        "max_length": 80,
        "things": 80,
    }
    with transaction() as session:
        request = TextWaitingPrompt(**defaults | columns)
        session.add(request)
        session.flush()
        session.add_all(WPModels(wp_id=request.id, model=model) for model in models)
        return request.id


def make_job(wp_id: UUID, worker_id: UUID, **columns: Any) -> UUID:
    with transaction() as session:
        job = TextProcessingGeneration(
            **{"wp_id": wp_id, "worker_id": worker_id, "model": "a/model"} | columns
        )
        session.add(job)
        session.flush()
        return job.id


def find_request(wp_id: UUID) -> TextWaitingPrompt | None:
    with transaction() as session:
        return session.get(TextWaitingPrompt, wp_id)


def find_job_row(job_id: UUID) -> TextProcessingGeneration | None:
    with transaction() as session:
        return session.get(TextProcessingGeneration, job_id)


def get_worker(worker_id: UUID) -> TextWorker:
    with transaction() as session:
        return session.get_one(TextWorker, worker_id)


def moved(now: datetime, **changes: Any) -> dict[str, Any]:
    """Columns of a worker created and last seen at a moment."""
    return {"created": now, "last_check_in": now, **changes}
