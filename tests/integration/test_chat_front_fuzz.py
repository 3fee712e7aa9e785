# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever is sent, the front refuses it in OpenAI's shape, at once, without a trace and without a
word of it.
"""

from collections.abc import Iterator
from random import Random

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fuzz_front import FuzzFront, fuzz_front
from tests.integration._fuzz_responses import list_response_examples

SEED = 6
ATTACK_COUNT = 500


@pytest.fixture(scope="module")
def front(service_urls: ServiceAddresses) -> Iterator[FuzzFront]:
    with fuzz_front(service_urls, "front_fuzz") as front:
        yield front


@pytest.mark.slow
def test_90_no_mutated_response_does_harm(front: FuzzFront) -> None:
    front.only = list_response_examples
    front.statuses.clear()
    try:
        front.attack(Random(SEED), ATTACK_COUNT)
    finally:
        front.only = None
    assert not front.problems, f"{len(front.problems)} problems\n" + "\n".join(front.problems[:20])
    assert front.statuses[200] > ATTACK_COUNT / 50


@pytest.mark.slow
@pytest.mark.parametrize("is_for_messages", [False, True], ids=["openai", "anthropic"])
def test_no_mutated_request_does_harm(front: FuzzFront, *, is_for_messages: bool) -> None:
    front.is_for_messages = is_for_messages
    front.statuses.clear()
    front.attack(Random(SEED), ATTACK_COUNT)
    assert not front.problems, f"{len(front.problems)} problems\n" + "\n".join(front.problems[:20])
    assert front.statuses[200] > ATTACK_COUNT / 50
