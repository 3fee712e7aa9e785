# SPDX-License-Identifier: AGPL-3.0-or-later
"""Chat requests with objects in the store, as a submit leaves them, and the objects themselves."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import update

from horde import object_deletes, r2, redis_ctrl
from horde.chat.stored_objects import (
    build_chat_image_key,
    build_chat_image_reference,
    build_chat_messages_key,
    build_inlined_messages,
)
from horde.classes.kobold.queue_class import compute_queue_class
from horde.classes.kobold.waiting_prompt import (
    TextWaitingPrompt,
    delete_stored_chat_images,
)
from horde.classes.kobold.worker import RequestNeeds
from horde.clock import utcnow
from horde.db import transaction
from horde.r2 import ObjectMissing
from tests.integration._fake_chat_worker import MODEL
from tests.integration.rows import make_request
from tests.integration.tcp_gate import TcpGate


def build_jpeg(index: int) -> bytes:
    """Bytes that the store takes for an image; nothing here looks into them."""
    return b"\xff\xd8\xff" + bytes([index]) * (50 + index) + b"\xff\xd9"


def build_messages(request_id: UUID, image_count: int, **extra: str) -> list[dict[str, Any]]:
    """A conversation whose last user message has the images, each with what else the client sent
    for it.
    """
    references = [
        build_chat_image_reference(build_chat_image_key(request_id, n)) for n in range(image_count)
    ]
    images = [{"type": "image_url", "image_url": {"url": url, **extra}} for url in references]
    parts: list[dict[str, Any]] = [{"type": "text", "text": 'What is "in" these?'}, *images]
    return [
        {"role": "system", "content": "Describe images briefly."},
        {"role": "user", "content": parts},
    ]


def make_stored_chat(
    user_id: int,
    *,
    image_count: int = 1,
    is_offloaded: bool = False,
    detail: str | None = "low",
    **columns: Any,
) -> UUID:
    """A waiting chat request with its objects stored: the row first, then the objects, then the
    activation.

    One that a cleaner took meanwhile leaves nothing. Raises StoreUnavailable and leaves an inactive
    row then.
    """
    request_id = uuid4()
    messages = build_messages(
        request_id, image_count, **({} if detail is None else {"detail": detail})
    )
    jpegs = {build_chat_image_key(request_id, n): build_jpeg(n) for n in range(image_count)}
    features = ["vision"] if image_count else []
    facts = RequestNeeds(
        user_id=user_id,
        is_chat=True,
        models=(MODEL,),
        max_length=64,
        max_context_length=2048,
        required_features=frozenset(features),
        has_images=image_count > 0,
    )
    stored = {
        "id": request_id,
        "is_chat": True,
        "messages": messages,
        "chat_messages_offloaded": is_offloaded,
        "chat_required_features": features,
        "max_length": 64,
        "max_context_length": 2048,
        "validated_backends": False,
        "queue_class": compute_queue_class(facts),
        "created": utcnow(),
    }
    is_active = columns.pop("active", True)
    make_request(user_id, (MODEL,), **stored | columns, active=False)
    for key, jpeg in jpegs.items():
        r2.upload_source_image(key, jpeg)
    if is_offloaded:
        r2.upload_chat_messages(
            build_chat_messages_key(request_id),
            build_inlined_messages(messages, jpegs),
            is_gzipped=False,
        )
    with transaction() as session:
        activated = (
            update(TextWaitingPrompt)
            .where(TextWaitingPrompt.id == request_id)
            .values(active=is_active)
        )
        is_there = session.scalar(activated.returning(TextWaitingPrompt.id)) is not None
    if not is_there:
        delete_stored_chat_images(
            list_keys(request_id, image_count=image_count, is_offloaded=is_offloaded)
        )
    return request_id


def list_keys(request_id: UUID, *, image_count: int = 1, is_offloaded: bool = False) -> list[str]:
    """The keys of `make_stored_chat`."""
    keys = [build_chat_image_key(request_id, n) for n in range(image_count)]
    return [*keys, build_chat_messages_key(request_id)] if is_offloaded else keys


def is_stored(key: str) -> bool:
    """Whether the store has the object."""
    try:
        r2.get_object(key)
    except ObjectMissing:
        return False
    return True


def count_stored(keys: Sequence[str]) -> int:
    """How many of the objects the store has."""
    return sum(map(is_stored, keys))


def list_waiting_deletes() -> set[str]:
    """The retry set."""
    members = redis_ctrl.call(
        redis_ctrl.cache_db, lambda client: client.smembers(object_deletes.RETRY_KEY)
    )
    assert isinstance(members, set)
    return {str(member) for member in members}


def open_store(gate: TcpGate) -> None:
    """Let the store answer again, and this process ask it at once: otherwise it leaves it alone for
    a while longer.
    """
    if gate.is_closed:
        gate.open()
    r2.state.get().breaker.record_success()
