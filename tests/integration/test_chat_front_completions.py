# SPDX-License-Identifier: AGPL-3.0-or-later
"""Completions that are waited for, through a real front and a real API. Numbers are those of the front's checklist."""

from collections.abc import Iterator

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import start_anew
from tests.integration.chat_front import EXPECTED_COMPLETION_KEYS, FrontStack, run_front_stack


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_completions") as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def test_1_a_completion_has_exactly_the_keys_of_the_reference(stack: FrontStack) -> None:
    completion = stack.complete("Blue.", reply={"prompt_tokens": 21, "completion_tokens": 3})
    assert set(completion) == EXPECTED_COMPLETION_KEYS
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": "Blue."}
