# SPDX-License-Identifier: AGPL-3.0-or-later
"""Chat requests with images over HTTP: what is fetched, stored and charged, every refusal, and what
none leaves behind.
"""

import base64
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import ip_address
from typing import Any
from uuid import UUID, uuid4

import pytest
from PIL import Image
from sqlalchemy import delete, func, insert, select

from devtools.services import ServiceAddresses
from horde import image, object_deletes, r2, redis_ctrl
from horde.actions import load_images, queue_requests, store_objects
from horde.apis.requests import CONFIG_EXTENSION
from horde.chat.stored_objects import count_inlined_bytes
from horde.chat_contract import MAX_CHAT_IMAGE_BYTES, MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED
from horde.classes.base.kudos import KudosReservation
from horde.classes.base.stats import Filter
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes
from horde.classes.kobold.waiting_prompt import (
    TextWaitingPrompt,
    retry_chat_image_deletes,
)
from horde.database import caches
from horde.db import require_engine, transaction
from horde.exceptions import ServiceUnavailable
from horde.outbound import Network
from tests.integration._fake_chat_worker import ChatHorde, chat_horde, start_anew
from tests.integration.rows import make_user
from tests.integration.stored_chats import list_waiting_deletes, open_store
from tests.integration.tcp_gate import TcpGate
from tests.integration.test_budgets import counting
from tests.integration.text_horde import forget_postings, list_discrepancies, list_postings
from tests.unit.test_image import RED, Door, Host, build_data_url, draw, running_host

LOOPBACK, PRIVATE = ip_address("127.0.0.1"), ip_address("127.0.0.2")
# Room for twenty images.
LIMITS = {"chat_limits": {"max_context_length": 16384, "max_length": 1024}}
SEES = {"chat_features": ["prompt_overflow_refused", "vision"], **LIMITS}
PICTURE = build_data_url(draw("RGB", "PNG", RED))
PLAIN_TAX, IMAGE_TAX = 1, 5


@pytest.fixture(scope="module")
def gate(service_urls: ServiceAddresses) -> Iterator[TcpGate]:
    gate = TcpGate(service_urls.s3_endpoint)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses, gate: TcpGate) -> Iterator[ChatHorde]:
    settings: dict[str, Any] = {
        "s3_endpoint": gate.url,
        "source_image_bucket": f"{service_urls.bucket}",
    }
    with chat_horde(service_urls, "chat_images", **settings) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde, gate: TcpGate) -> Iterator[ChatHorde]:
    """A horde with a worker that sees; its store is empty."""
    start_anew()
    r2.delete_objects(list_stored())
    module_horde.take_nothing(**SEES)
    forget_postings()
    yield module_horde
    open_store(gate)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """The address of a public host, and what it was asked for; every other name is private."""

    def resolve(name: str, _port: int) -> list[Any]:
        return [LOOPBACK] if name == "pictures.example" else [PRIVATE]

    network = Network(resolve=resolve, is_allowed=lambda address: address == LOOPBACK)
    monkeypatch.setattr(image.state.get(), "network", network)
    with running_host() as started:
        yield started


def list_stored() -> list[str]:
    return sorted(key for _bucket, key in r2.list_objects())


def with_images(
    *urls: str, text: str = "What is in these?", **image_url: Any
) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url, **image_url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def get_messages(request_id: str) -> Any:
    with transaction() as session:
        return session.scalar(
            select(TextWaitingPrompt.messages).where(TextWaitingPrompt.id == UUID(request_id))
        )


def count_rows() -> tuple[int, int]:
    """Requests and active holds."""
    with transaction() as session:
        requests = session.scalar(select(func.count()).select_from(TextWaitingPrompt)) or 0
        holds = (
            session.scalar(
                select(func.count()).select_from(KudosReservation).where(KudosReservation.active)
            )
            or 0
        )
    return requests, holds


def check_nothing_left(horde: ChatHorde) -> None:
    """No row, no hold, no object, no charge."""
    assert count_rows() == (0, 0)
    assert list_stored() == []
    assert list_postings(horde.requester_id) == []
    assert not list_discrepancies()


def pad(data: bytes, size: int) -> bytes:
    """An image with so many bytes behind its end."""
    return data + bytes(size - len(data))


# --- what is stored and charged
# ---------------------------------------------------------------------------------------


def test_images_are_stored_as_jpegs_under_the_keys_the_messages_name(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    address, seen = host
    request_id = horde.queue(
        messages=with_images(PICTURE, f"{address}/picture", detail="low"), max_tokens=64
    )
    keys = [f"{request_id}_chat_0.jpg", f"{request_id}_chat_1.jpg"]
    assert list_stored() == keys
    assert seen == ["/picture"]
    assert [part["image_url"] for part in get_messages(request_id)[0]["content"][1:]] == [
        {"url": f"horde-r2://{key}", "detail": "low"} for key in keys
    ]
    for key in keys:
        stored = Image.open(io.BytesIO(r2.get_object(key)))
        assert (stored.format, stored.size) == ("JPEG", (64, 32))


def test_the_row_holds_neither_bytes_nor_urls(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    horde.queue(messages=with_images(PICTURE, f"{host[0]}/picture?secret=1"), max_tokens=64)
    with transaction() as session:
        row = str(session.scalar(select(func.to_jsonb(TextWaitingPrompt.__table__.table_valued()))))
    assert "horde-r2://" in row
    assert "base64" not in row
    assert "pictures.example" not in row
    assert "[image]" in row


def test_each_image_costs_five_kudos_in_quote_and_activation(horde: ChatHorde) -> None:
    quotes = [
        horde.submit(
            messages=with_images(*[PICTURE] * count), max_tokens=64, horde={"dry_run": True}
        ).json["kudos"]
        for count in (0, 1, 3)
    ]
    assert [quote - quotes[0] for quote in quotes] == [0, IMAGE_TAX, 3 * IMAGE_TAX]
    forget_postings()
    answer = horde.submit(messages=with_images(*[PICTURE] * 3), max_tokens=64)
    assert answer.json["kudos"] == quotes[2]
    assert sum(list_postings(horde.requester_id)) == -(PLAIN_TAX + 3 * IMAGE_TAX)
    assert horde.status(answer.json["id"])["kudos"] == PLAIN_TAX + 3 * IMAGE_TAX


def test_the_kudos_cap_counts_the_images(horde: ChatHorde) -> None:
    quote = horde.submit(
        messages=with_images(PICTURE), max_tokens=64, horde={"dry_run": True}
    ).json["kudos"]
    assert (
        horde.submit(
            messages=with_images(PICTURE), max_tokens=64, horde={"max_kudos": quote}
        ).status_code
        == 202
    )
    answer = horde.submit(
        messages=with_images(PICTURE), max_tokens=64, horde={"max_kudos": quote - 1}
    )
    assert (answer.status_code, answer.json["rc"]) == (400, "ChatKudosCapExceeded")


def test_each_image_counts_512_tokens(horde: ChatHorde) -> None:
    def estimate(*urls: str) -> int:
        answer = horde.submit(messages=with_images(*urls), max_tokens=64, horde={"dry_run": True})
        return int(answer.json["resolved"]["estimated_prompt_tokens"])

    mark = "\n[image]"
    text = "user: What is in these?"
    assert estimate() == -(-len(text) // 3)
    assert estimate(PICTURE, PICTURE) == -(-len(text + 2 * mark) // 3) + 1024


def test_a_dry_run_fetches_and_stores_nothing(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    address, seen = host
    unreadable = build_data_url(b"no image")
    answer = horde.submit(
        messages=with_images(f"{address}/picture", unreadable),
        max_tokens=64,
        horde={"dry_run": True},
    )
    assert answer.status_code == 200
    assert "[image]" in answer.json["resolved"]["prompt"]
    assert seen == []
    check_nothing_left(horde)


def test_images_of_dropped_turns_are_neither_fetched_stored_nor_charged(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    address, seen = host
    long = "word " * 10_000
    messages = [
        *with_images(f"{address}/old", build_data_url(b"no image"), text=long),
        {"role": "assistant", "content": "A cat."},
        *with_images(f"{address}/new"),
    ]
    forget_postings()
    answer = horde.submit(messages=messages, max_tokens=64)
    assert answer.status_code == 202, answer.json
    assert seen == ["/new"]
    assert list_stored() == [f"{answer.json['id']}_chat_0.jpg"]
    assert sum(list_postings(horde.requester_id)) == -(PLAIN_TAX + IMAGE_TAX)
    assert len(get_messages(answer.json["id"])) == 1


def test_moderation_rewrites_the_texts_and_leaves_the_images(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    with transaction() as session:
        session.execute(
            insert(Filter), {"regex": "dragon", "filter_type": 10, "replacement": "lizard"}
        )
    caches.clear_all()
    _, key = make_user(UserRoleTypes.FLAGGED)
    messages = [
        *with_images(PICTURE, text="dragon " * 10_000),
        *with_images(f"{host[0]}/new", text="A dragon", detail="low"),
    ]
    request_id = horde.queue(key=key, messages=messages, max_tokens=64)
    with transaction() as session:
        session.execute(delete(Filter))
    caches.clear_all()
    stored_key = f"{request_id}_chat_0.jpg"
    assert list_stored() == [stored_key]
    assert get_messages(request_id) == with_images(
        f"horde-r2://{stored_key}", text="A lizard", detail="low"
    )


def test_without_its_images_a_trimmed_request_needs_no_eyes(horde: ChatHorde) -> None:
    start_anew()
    horde.take_nothing(**LIMITS)  # sees nothing
    messages = [
        *with_images(PICTURE, text="word " * 10_000),
        {"role": "user", "content": "And now?"},
    ]
    request_id = horde.queue(messages=messages, max_tokens=64)
    assert list_stored() == []
    assert horde.take(**LIMITS)["payload"]["messages"] == [messages[1]]
    assert horde.status(request_id)["processing"] == 1


def test_a_worker_that_sees_gets_the_stored_image(horde: ChatHorde) -> None:
    request_id = horde.queue(messages=with_images(PICTURE, detail="high"), max_tokens=64)
    part = horde.take(**SEES, image_transports=["base64"])["payload"]["messages"][0]["content"][1]
    assert part["image_url"]["detail"] == "high"
    kind, payload = part["image_url"]["url"].split(",")
    assert kind == "data:image/jpeg;base64"
    assert base64.b64decode(payload) == r2.get_object(f"{request_id}_chat_0.jpg")


# --- refusals
# --------------------------------------------------------------------------------------------------


def refuse(
    horde: ChatHorde, *urls: str, key: str | None = None, is_dry_run: bool = False
) -> tuple[int, str, str]:
    """(status, rc, message) of a request that is refused and leaves nothing."""
    forget_postings()
    answer = horde.submit(
        messages=with_images(*urls), max_tokens=64, key=key, horde={"dry_run": is_dry_run}
    )
    check_nothing_left(horde)
    return answer.status_code, answer.json["rc"], answer.json["message"]


def test_more_than_twenty_images_are_refused_for_everybody(horde: ChatHorde) -> None:
    for is_dry_run in (False, True):
        assert refuse(horde, *[PICTURE] * 21, key=horde.owner_key, is_dry_run=is_dry_run)[:2] == (
            400,
            "TooManyExtraSourceImages",
        )


@pytest.mark.parametrize(
    ("url", "rc"),
    [
        pytest.param(build_data_url(b"no image"), "SourceImageUnreadable", id="no image"),
        pytest.param("data:image/png;base64,@@@", "SourceImageUnreadable", id="no base64"),
        pytest.param("data:image/png;base64,", "SourceImageUnreadable", id="empty"),
        pytest.param(
            build_data_url(draw("RGB", "PNG", RED)[:-30]), "SourceImageUnreadable", id="truncated"
        ),
        pytest.param(build_data_url(b"%!PS-Adobe-3.0\n"), "SourceImageUnreadable", id="postscript"),
        pytest.param(
            build_data_url(draw("1", "PNG", size=(3073, 3072))),
            "SourceImageResolutionExceeded",
            id="pixels",
        ),
        pytest.param(
            build_data_url(bytes(MAX_CHAT_IMAGE_BYTES + 1)), "SourceImageSizeExceeded", id="size"
        ),
        pytest.param("ftp://pictures.example/a", "SourceImageUrlInvalid", id="scheme"),
        pytest.param("{host}/status/404", "SourceImageUrlInvalid", id="not found"),
        pytest.param("{host}/hops/4", "SourceImageUrlInvalid", id="four redirects"),
        pytest.param("{host}/endless", "SourceImageSizeExceeded", id="endless"),
        pytest.param("http://private.example/a", "SourceImageUrlRefused", id="private name"),
        pytest.param(
            "http://169.254.169.254/latest/meta-data", "SourceImageUrlRefused", id="metadata"
        ),
        pytest.param("http://0177.0.0.2/", "SourceImageUrlRefused", id="octal"),
        pytest.param("http://xn--a/x.png", "SourceImageUrlInvalid", id="undecodable host"),
        pytest.param("https://.example/x.png", "SourceImageUrlInvalid", id="empty label"),
        pytest.param(
            "{host}/redirect/http://xn--a/x.png", "SourceImageUrlInvalid", id="undecodable hop"
        ),
        pytest.param(
            "{host}/redirect/http://private.example/", "SourceImageUrlRefused", id="private hop"
        ),
    ],
)
def test_an_image_that_cannot_be_taken_refuses_the_request_and_leaves_nothing(
    horde: ChatHorde, host: tuple[str, list[str]], url: str, rc: str
) -> None:
    for urls, place in (([url], 1), ([PICTURE, url], 2)):
        filled = [text.replace("{host}", host[0]) for text in urls]
        status, code, message = refuse(horde, *filled, key=horde.owner_key)
        assert (status, code) == (400, rc), message
        assert f"'messages[0].content[{place}].image_url.url'" in message


def test_a_refused_image_asks_nothing_of_the_store(horde: ChatHorde, gate: TcpGate) -> None:
    """Not even a delete: while the store is away, keys that were never stored would fill the retry
    set.
    """
    redis_ctrl.delete(object_deletes.RETRY_KEY)
    gate.close()
    answer = horde.submit(messages=with_images(PICTURE, build_data_url(b"no image")), max_tokens=64)
    assert (answer.status_code, answer.json["rc"]) == (400, "SourceImageUnreadable")
    assert list_waiting_deletes() == set()
    assert not r2.is_circuit_open()
    open_store(gate)
    check_nothing_left(horde)


def test_of_two_images_that_cannot_be_taken_the_first_is_told(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    unreadable, private = build_data_url(pad(b"no image", 4096)), "http://private.example/a"
    for urls, rc in (
        ((unreadable, private), "SourceImageUnreadable"),
        ((private, unreadable), "SourceImageUrlRefused"),
    ):
        status, code, message = refuse(horde, *urls)
        assert (status, code) == (400, rc)
        assert "content[1]" in message


def test_a_request_has_two_images_encoded_at_a_time_and_keeps_their_order(
    horde: ChatHorde, host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, lock = 0, 0, threading.Lock()
    real, meeting = image.encode_chat_image, threading.Barrier(2)

    def encode(data: bytes) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meeting.wait(timeout=60)  # each one finds another one beside it
        try:
            return real(data)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(load_images, "encode_chat_image", encode)
    widths = [64, 128, 192, 256]
    pictures = [build_data_url(draw("RGB", "PNG", RED, size=(width, 32))) for width in widths]
    request_id = horde.queue(messages=with_images(*pictures), max_tokens=64)
    assert most == 2
    keys = [f"{request_id}_chat_{index}.jpg" for index in range(len(widths))]
    assert [Image.open(io.BytesIO(r2.get_object(key))).width for key in keys] == widths


def test_no_connection_is_attempted_to_a_refused_address(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    door = Door()
    try:
        for url in (
            f"http://private.example:{door.port}/",
            f"{host[0]}/redirect/http://private.example:{door.port}/",
        ):
            assert refuse(horde, url)[1] == "SourceImageUrlRefused"
        assert door.count_knocks() == 0
    finally:
        door.listener.close()


def test_the_users_total_counts_data_urls_before_anything_is_fetched(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    half = build_data_url(
        pad(draw("RGB", "PNG", RED), MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED // 2 + 1)
    )
    for is_dry_run in (False, True):
        status, rc, message = refuse(horde, f"{host[0]}/picture", half, half, is_dry_run=is_dry_run)
        assert (status, rc) == (400, "SourceImageSizeExceeded")
        assert str(2 * (MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED // 2 + 1)) in message
        assert str(MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED) in message
    assert host[1] == []
    assert (
        horde.submit(
            messages=with_images(half, half), max_tokens=64, key=horde.owner_key
        ).status_code
        == 202
    )


def test_the_total_runs_on_while_images_are_fetched(
    horde: ChatHorde, host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Host, "picture", pad(draw("RGB", "PNG", RED), MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED // 2 + 1)
    )
    status, rc, message = refuse(horde, *[f"{host[0]}/{number}" for number in range(4)])
    assert (status, rc) == (400, "SourceImageSizeExceeded")
    assert str(2 * (MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED // 2 + 1)) in message
    assert host[1] == ["/0", "/1"]


def test_images_that_came_along_and_fetched_ones_share_the_total(
    horde: ChatHorde, host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED // 2 + 1
    picture = pad(draw("RGB", "PNG", RED), size)
    monkeypatch.setattr(Host, "picture", picture)
    status, rc, message = refuse(horde, f"{host[0]}/0", f"{host[0]}/1", build_data_url(picture))
    assert (status, rc) == (400, "SourceImageSizeExceeded")
    assert str(2 * size) in message
    assert host[1] == ["/0"]


def test_the_stored_jpegs_are_held_to_the_same_total(horde: ChatHorde) -> None:
    tile = Image.effect_noise((128, 128), 90).convert("RGB")
    noise = Image.new("RGB", (2048, 2048))
    for place in range(256):
        noise.paste(tile, (place % 16 * 128, place // 16 * 128))
    output = io.BytesIO()
    noise.save(output, "WEBP", lossless=True)  # finds the repetition; JPEG does not
    assert 4 * len(output.getvalue()) < MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED
    urls = [build_data_url(output.getvalue())] * 4
    status, rc, message = refuse(horde, *urls)
    assert (status, rc) == (400, "SourceImageSizeExceeded")
    assert "the encoded size passed the cap" in message
    assert (
        horde.submit(messages=with_images(*urls), max_tokens=64, key=horde.owner_key).status_code
        == 202
    )


def test_what_a_worker_reads_stays_within_the_bound_of_a_body(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is sent within its bound may be six times as long as JSON."""
    request_id = horde.queue(messages=with_images(PICTURE, PICTURE), max_tokens=64)
    sizes = {key: len(r2.get_object(key)) for key in list_stored()}
    size = count_inlined_bytes(get_messages(request_id), sizes)
    start_anew()
    horde.take_nothing(**SEES)
    r2.delete_objects(list_stored())
    monkeypatch.setattr(load_images, "MAX_CHAT_BODY_BYTES", size)
    assert refuse(horde, PICTURE, PICTURE, PICTURE)[:2] == (413, "RequestTooLarge")
    answer = horde.submit(
        messages=with_images(PICTURE, PICTURE, text="What is in these\u0001"), max_tokens=64
    )
    assert (answer.status_code, answer.json["rc"]) == (413, "RequestTooLarge")
    assert str(size + 5) in answer.json["message"]
    check_nothing_left(horde)
    assert horde.submit(messages=with_images(PICTURE, PICTURE), max_tokens=64).status_code == 202


def test_an_image_is_refused_only_after_every_other_check(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    messages = with_images(f"{host[0]}/picture", build_data_url(b"no image"))
    for changes, rc in (
        ({"model": "nobody/has-this"}, "UnknownChatModel"),
        ({"horde": {"max_kudos": 1}}, "ChatKudosCapExceeded"),
        ({"stop": [f"x{number}" for number in range(129)]}, None),
        ({"horde": {"context_fit": "reject", "max_context_length": 80}}, "PromptExceedsContext"),
    ):
        answer = horde.submit(**{"messages": messages, "max_tokens": 64} | changes)
        assert answer.status_code in {400, 404}
        assert rc is None or answer.json["rc"] == rc
    unpaid = horde.submit(
        messages=messages, max_tokens=1024, key=ANONYMOUS_KEY, horde={"slow_workers": False}
    )
    assert unpaid.status_code == 403
    assert host[1] == []
    assert list_stored() == []


def test_slow_hosts_take_half_a_minute_of_a_request_at_most(
    horde: ChatHorde, host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_images, "FETCH_SECONDS_OF_A_REQUEST", 0.5)

    answer = Host.answer

    def answer_late(handler: Host, status: int, body: bytes, **headers: str) -> None:
        time.sleep(0.2)
        answer(handler, status, body, **headers)

    monkeypatch.setattr(Host, "answer", answer_late)
    status, rc, _ = refuse(
        horde, *[f"{host[0]}/{number}" for number in range(20)], key=horde.owner_key
    )
    assert (status, rc) == (400, "SourceImageUrlInvalid")
    assert len(host[1]) < 6


# --- the store, races, budgets
# ----------------------------------------------------------------------------------------


def test_while_the_store_is_away_a_request_is_refused_uncharged_and_leaves_nothing(
    horde: ChatHorde, gate: TcpGate
) -> None:
    forget_postings()
    gate.close()
    answer = horde.submit(messages=with_images(PICTURE, PICTURE), max_tokens=64)
    assert (answer.status_code, answer.json["rc"]) == (503, "ChatImageStorageUnavailable")
    open_store(gate)
    check_nothing_left(horde)
    assert horde.submit(messages=with_images(PICTURE), max_tokens=64).status_code == 202


def test_a_silent_store_holds_one_request_and_not_the_next(
    horde: ChatHorde, gate: TcpGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its put nor its deletes: those wait for the store."""
    redis_ctrl.delete(object_deletes.RETRY_KEY)
    forget_postings()
    config = horde.app.extensions[CONFIG_EXTENSION]
    silent = Door()
    monkeypatch.setattr(r2, "READ_SECONDS", 0.2)
    r2.connect(replace(config, s3_endpoint=f"http://127.0.0.1:{silent.port}"))
    try:
        for knocks in (r2.ATTEMPTS, 0, 0):
            answer = horde.submit(messages=with_images(PICTURE, PICTURE), max_tokens=64)
            assert (answer.status_code, answer.json["rc"]) == (503, "ChatImageStorageUnavailable")
            assert silent.count_knocks() == knocks
        assert horde.submit(max_tokens=64, horde={"dry_run": True}).status_code == 200
    finally:
        silent.listener.close()
        r2.connect(config)
    assert [key.partition("_")[2] for key in list_waiting_deletes()] == ["chat_0.jpg"], (
        "no other was ever sent"
    )
    check_nothing_left(horde)
    assert retry_chat_image_deletes() == 1
    assert horde.submit(messages=with_images(PICTURE), max_tokens=64).status_code == 202


def test_a_failed_activation_leaves_no_object(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_requests, "activate_text_request", lambda *_args, **_kwargs: False)
    assert horde.submit(messages=with_images(PICTURE), max_tokens=64).status_code == 503
    assert list_stored() == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (load_images, "encode_chat_image"),
        (store_objects, "upload_source_image"),
        (queue_requests, "activate_text_request"),
    ],
)
def test_whatever_ends_a_submit_before_its_activation_takes_everything_back(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Errors that nobody foresaw, at each step between the two transactions."""
    forget_postings()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        answer = horde.submit(messages=with_images(PICTURE, PICTURE), max_tokens=64)
    assert (answer.status_code, answer.json) == (500, {"message": "Internal Server Error"})
    check_nothing_left(horde)


def test_a_request_whose_activation_was_answered_too_late_is_not_taken_back(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may break after the commit: workers see the request then."""
    activate = queue_requests.run_single_statement

    def lose_the_answer(work: Any) -> Any:
        answer = activate(work)
        if answer is True:
            raise ServiceUnavailable("The database cannot be reached. Try again later.")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(queue_requests, "run_single_statement", lose_the_answer)
        answer = horde.submit(messages=with_images(PICTURE), max_tokens=64)
    assert answer.status_code == 503
    assert (count_rows()[0], len(list_stored())) == (1, 1)


@pytest.mark.race
def test_of_two_submissions_with_one_key_the_loser_leaves_no_object(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2)
    activate = queue_requests.activate_text_request

    def meet(*args: Any, **kwargs: Any) -> bool:
        barrier.wait(60)
        return activate(*args, **kwargs)

    monkeypatch.setattr(queue_requests, "activate_text_request", meet)
    body = {
        "messages": with_images(PICTURE),
        "max_tokens": 64,
        "horde": {"operation_key": str(uuid4())},
    }
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: horde.submit(**body), range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 202]
    assert len({answer.json["id"] for answer in answers}) == 1
    assert list_stored() == [f"{answers[0].json['id']}_chat_0.jpg"]
    assert count_rows()[0] == 1


def test_a_repeated_key_fetches_and_stores_nothing_and_another_image_conflicts(
    horde: ChatHorde, host: tuple[str, list[str]]
) -> None:
    body: dict[str, Any] = {"max_tokens": 64, "horde": {"operation_key": str(uuid4())}}
    first = horde.submit(messages=with_images(f"{host[0]}/a"), **body)
    again = horde.submit(messages=with_images(f"{host[0]}/a"), **body)
    assert (again.status_code, again.json["id"]) == (200, first.json["id"])
    other = horde.submit(messages=with_images(f"{host[0]}/b"), **body)
    assert (other.status_code, other.json["rc"]) == (400, "OperationKeyConflict")
    assert host[1] == ["/a"]
    assert len(list_stored()) == 1


def test_a_request_with_images_stays_within_twelve_statements_and_two_transactions(
    horde: ChatHorde,
) -> None:
    horde.queue(messages=with_images(PICTURE), max_tokens=64)  # warms the caches
    for image_count in (1, 20):
        with counting() as counted:
            horde.queue(messages=with_images(*[PICTURE] * image_count), max_tokens=64)
        assert len(counted.statements) <= 12, counted.statements
        assert counted.transactions <= 2


def test_no_connection_to_the_database_is_held_while_images_are_fetched_decoded_and_stored(
    horde: ChatHorde, host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    pool: Any = require_engine().pool

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            held.append(pool.checkedout())
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (load_images, "load_chat_image"),
        (load_images, "encode_chat_image"),
        (store_objects, "upload_source_image"),
    ):
        watch(module, name)
    horde.queue(messages=with_images(f"{host[0]}/picture", PICTURE), max_tokens=64)
    assert held == [0] * 6
