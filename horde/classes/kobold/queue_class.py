# SPDX-License-Identifier: AGPL-3.0-or-later
"""Queue classes: requests that the same workers can serve, told apart by one number.

Whether a worker may take a request depends on the request's needs alone, never on when it came or
who sent it. So the needs are hashed into `waiting_prompts.queue_class`, the queue's index is
ordered by class first, and a pop judges each class once instead of each row: ten thousand waiting
requests that a worker cannot serve cost it one comparison. Lengths enter by their power-of-two
bucket, which keeps the number of classes small; the claim compares them exactly.
"""

import hashlib
import json
from dataclasses import replace

from horde.classes.kobold.worker import RequestNeeds


def length_bucket(length: int) -> int:
    """The smallest power of two that is at least `length` tokens."""
    return 1 << max(length - 1, 0).bit_length()


def least_needs_of_class(needs: RequestNeeds) -> RequestNeeds:
    """The needs of the smallest request in the same class: what a worker cannot serve of it, it
    cannot serve at all.
    """
    return replace(
        needs,
        max_length=length_bucket(needs.max_length) // 2 + 1,
        max_context_length=length_bucket(needs.max_context_length) // 2 + 1,
    )


def compute_queue_class(needs: RequestNeeds) -> int:
    """The class of a request as a signed 64-bit integer, equal in every process and release that
    hashes the same needs.

    The requester is left out: who asks decides only whether a worker in maintenance serves its
    owner, which the claim compares by itself.
    """
    identity = [
        needs.is_chat,
        sorted(set(needs.models)),
        length_bucket(needs.max_length),
        length_bucket(needs.max_context_length),
        needs.trusted_workers,
        needs.validated_backends,
        needs.slow_workers,
        needs.nsfw,
        sorted(str(worker_id) for worker_id in needs.worker_ids),
        needs.worker_blacklist,
        sorted(needs.required_features),
        needs.tools_temperature,
        needs.has_images,
    ]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
