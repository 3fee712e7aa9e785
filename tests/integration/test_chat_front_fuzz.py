# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever is sent, the front refuses it in OpenAI's shape, at once, without a trace and without a
word of it.
"""

from collections.abc import Iterator
from random import Random

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fuzz_front import FuzzFront, fuzz_front

SEED = 6
ATTACK_COUNT = 500


@pytest.fixture(scope="module")
def front(service_urls: ServiceAddresses) -> Iterator[FuzzFront]:
    with fuzz_front(service_urls, "front_fuzz") as front:
        yield front


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "responses", "messages"])
def test_90_no_mutated_request_does_harm(front: FuzzFront, form: str | None) -> None:
    front.form = form
    front.statuses.clear()
    front.attack(Random(SEED), ATTACK_COUNT)
    assert not front.problems, f"{len(front.problems)} problems\n" + "\n".join(front.problems[:20])
    assert front.statuses[200] > ATTACK_COUNT / 50
