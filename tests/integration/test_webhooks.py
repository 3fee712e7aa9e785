# SPDX-License-Identifier: AGPL-3.0-or-later
import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde import webhooks
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.db import transaction
from horde.webhooks import Delivery, WebhookSender
from tests.integration.rows import make_user
from tests.integration.text_horde import KNOWN, TextHorde, own_text_horde, start_clean

ADDRESS = "https://hook.example/told"


class KeepingSender(WebhookSender):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Delivery] = []

    def queue(self, delivery: Delivery) -> None:
        self.kept.append(delivery)

    def read_bodies(self) -> list[dict[str, Any]]:
        return [json.loads(delivery.body) for delivery in self.kept]


@pytest.fixture(scope="module")
def horde(service_urls: ServiceAddresses) -> Iterator[TextHorde]:
    with own_text_horde(service_urls, "horde_webhooks") as app:
        yield TextHorde(app)


@pytest.fixture
def sender(horde: TextHorde, monkeypatch: pytest.MonkeyPatch) -> KeepingSender:
    start_clean()
    keeping = KeepingSender()
    monkeypatch.setattr(webhooks.state.get(), "sender", keeping)
    return keeping


def test_a_stored_generation_is_told_once(horde: TextHorde, sender: KeepingSender) -> None:
    _, key = make_user()
    request_id = horde.queue(webhook=ADDRESS)
    job_id = horde.take_job(key)
    answer = horde.submit(key, job_id, "and so on", seed=7)
    assert horde.submit(key, job_id, "and so on").json["rc"] == "DuplicateGen"
    assert answer.json is not None
    shown = horde.status(request_id)["generations"][0]
    assert [delivery.url for delivery in sender.kept] == [ADDRESS]
    assert sender.read_bodies() == [
        {
            "text": "and so on",
            "seed": 7,
            "worker_id": shown["worker_id"],
            "worker_name": "a worker",
            "model": KNOWN,
            "id": job_id,
            "state": "ok",
            "gen_metadata": [],
            "request": request_id,
            "kudos": answer.json["reward"],
        }
    ]


def test_a_censored_generation_is_told_as_such(horde: TextHorde, sender: KeepingSender) -> None:
    _, key = make_user()
    horde.queue(webhook=ADDRESS)
    horde.submit(key, horde.take_job(key), "", state="csam")
    told = sender.read_bodies()[0]
    assert (told["state"], told["gen_metadata"]) == (
        "csam",
        [{"type": "censorship", "value": "csam"}],
    )


def test_a_fault_is_not_told(horde: TextHorde, sender: KeepingSender) -> None:
    _, key = make_user()
    horde.queue(webhook=ADDRESS)
    assert horde.fault(key, horde.take_job(key)).status_code == 200
    assert sender.kept == []


def test_a_fake_generation_is_not_told(horde: TextHorde, sender: KeepingSender) -> None:
    _, key = make_user()
    horde.queue(webhook=ADDRESS)
    job_id = horde.take_job(key)
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.id == UUID(job_id))
            .values(fake=True)
        )
    assert horde.submit(key, job_id).status_code == 200
    assert sender.kept == []


def test_a_request_without_a_webhook_is_not_told(horde: TextHorde, sender: KeepingSender) -> None:
    _, key = make_user()
    horde.queue()
    assert horde.submit(key, horde.take_job(key)).status_code == 200
    assert sender.kept == []


@pytest.mark.parametrize("address", ["http://hook.example/", "hook.example", ""])
def test_a_webhook_that_is_not_https_is_refused(
    horde: TextHorde, sender: KeepingSender, address: str
) -> None:
    answer = horde.ask(webhook=address)
    assert (answer.status_code, (answer.json or {}).get("rc")) == (400, "BadRequest")
