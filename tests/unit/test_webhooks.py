# SPDX-License-Identifier: AGPL-3.0-or-later
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from ipaddress import ip_address

import pytest

from horde import webhooks
from horde.outbound import Network
from horde.webhooks import SENDER_COUNT, Delivery, WebhookOutcome, WebhookSender, deliver
from tests.unit.test_outbound import list_seen, loopback_network, running_server


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with running_server() as started:
        yield started


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[WebhookOutcome]:
    """What was counted."""
    counted: list[WebhookOutcome] = []
    monkeypatch.setattr(webhooks, "count", counted.append)
    return counted


@pytest.mark.parametrize(
    ("status", "outcome", "attempts"),
    [
        (200, WebhookOutcome.DELIVERED, 1),
        (204, WebhookOutcome.DELIVERED, 1),
        (302, WebhookOutcome.DELIVERED, 1),
        (404, WebhookOutcome.FAILED, 3),
        (500, WebhookOutcome.FAILED, 3),
    ],
)
def test_a_delivery_ends_with_an_answer_of_2xx_or_3xx(
    server: ThreadingHTTPServer, status: int, outcome: WebhookOutcome, attempts: int
) -> None:
    delivery = Delivery(f"http://hook.example:{server.server_port}/{status}", b"{}")
    assert deliver(delivery, loopback_network()) is outcome
    assert len(list_seen(server)) == attempts


def test_a_delivery_to_a_private_address_is_refused_at_once(server: ThreadingHTTPServer) -> None:
    lookups: list[str] = []

    def resolve(host: str, _port: int) -> list[object]:
        lookups.append(host)
        return [ip_address("127.0.0.1")]

    delivery = Delivery(f"http://hook.example:{server.server_port}/200", b"{}")
    assert deliver(delivery, Network(resolve=resolve)) is WebhookOutcome.REFUSED
    assert (list_seen(server), lookups) == ([], ["hook.example"])


def test_the_sender_delivers_what_is_queued_before_it_stops(
    server: ThreadingHTTPServer, outcomes: list[WebhookOutcome]
) -> None:
    sender = webhooks.start_webhooks(loopback_network())
    body = {"text": "Straße \ud800", "kudos": 1.5}
    for _ in range(3):
        webhooks.queue_webhook(f"http://hook.example:{server.server_port}/200", body)
    sender.stop()
    webhooks.state.get().sender = None
    assert outcomes == [WebhookOutcome.DELIVERED] * 3
    assert [json.loads(seen["body"]) for seen in list_seen(server)] == [
        {"text": "Straße ?", "kudos": 1.5}
    ] * 3


def test_hosts_that_cannot_be_decoded_end_no_delivery_but_their_own(
    server: ThreadingHTTPServer, outcomes: list[WebhookOutcome]
) -> None:
    """As many as would end each thread several times over."""
    sender = WebhookSender(loopback_network())
    sender.start()
    for _ in range(4 * SENDER_COUNT):
        sender.queue(Delivery("https://xn--a/hook", b"{}"))
    sender.queue(Delivery(f"http://hook.example:{server.server_port}/200", b"{}"))
    sender.stop()
    assert outcomes.count(WebhookOutcome.FAILED) == 4 * SENDER_COUNT
    assert outcomes.count(WebhookOutcome.DELIVERED) == 1


def test_an_error_that_nobody_foresaw_ends_one_delivery_and_is_logged_without_its_text(
    server: ThreadingHTTPServer,
    outcomes: list[WebhookOutcome],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = webhooks.deliver

    def fail_first(delivery: Delivery, network: Network) -> WebhookOutcome:
        if delivery.url == "https://fails.example":
            raise RuntimeError(delivery.url)
        return sent(delivery, network)

    monkeypatch.setattr(webhooks, "deliver", fail_first)
    sender = WebhookSender(loopback_network())
    sender.start()
    for _ in range(2 * SENDER_COUNT):
        sender.queue(Delivery("https://fails.example", b"{}"))
    sender.queue(Delivery(f"http://hook.example:{server.server_port}/200", b"{}"))
    sender.stop()
    assert outcomes.count(WebhookOutcome.DELIVERED) == 1
    assert caplog.messages.count("horde.thread.survived") == 2 * SENDER_COUNT
    assert all(record.error_class == "builtins.RuntimeError" for record in caplog.records)
    assert all("fails.example" not in str(vars(record)) for record in caplog.records)


def test_a_full_queue_drops_and_counts(outcomes: list[WebhookOutcome]) -> None:
    sender = WebhookSender(loopback_network())  # not started, so nothing is taken
    for _ in range(webhooks.QUEUE_LENGTH + 2):
        sender.queue(Delivery("https://hook.example/", b"{}"))
    assert outcomes == [WebhookOutcome.DROPPED] * 2


def test_a_stopped_sender_drops_and_counts(outcomes: list[WebhookOutcome]) -> None:
    sender = WebhookSender(loopback_network())
    sender.start()
    sender.stop()
    sender.queue(Delivery("https://hook.example/", b"{}"))
    assert outcomes == [WebhookOutcome.DROPPED]
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("horde-webhook")
    ]


def test_without_a_sender_nothing_is_kept(outcomes: list[WebhookOutcome]) -> None:
    webhooks.queue_webhook("https://hook.example/", {})
    assert outcomes == []
