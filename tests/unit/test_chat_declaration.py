# SPDX-License-Identifier: AGPL-3.0-or-later
"""The chat declaration of a text pop."""

from typing import Any

import pytest

from horde.classes.kobold.chat_request import ChatDeclaration, parse_chat_declaration_fields
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

POP: dict[str, Any] = {
    "models": ["other", "koboldcpp/model Q4:é"],
    "chat_jobs": True,
    "chat_features": ["vision", "seed", "seed", "from_the_future", "prompt_overflow_refused"],
    "chat_limits": {"max_context_length": 8192, "max_length": 1024, "tools_max_temperature": 0},
    "model_id": "koboldcpp/model Q4:é",
    "image_transports": ["url", "carrier_pigeon", "base64"],
}


def test_declaration_holds_the_known_names_sorted() -> None:
    assert parse_chat_declaration_fields(POP) == ChatDeclaration(
        prompt_jobs=True,
        model_id="koboldcpp/model Q4:é",
        features=("prompt_overflow_refused", "seed", "vision"),
        max_context_length=8192,
        max_length=1024,
        tools_max_temperature=0.0,
        image_transports=("base64", "url"),
    )


@pytest.mark.parametrize("chat_jobs", [None, False])
def test_pop_without_chat_jobs_withdraws_the_declaration_and_reads_none_of_it(
    chat_jobs: bool | None,
) -> None:
    assert (
        parse_chat_declaration_fields(POP | {"chat_jobs": chat_jobs, "chat_limits": "nonsense"})
        is None
    )


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(("prompt_jobs", "chat_features", "image_transports"))
    declaration = parse_chat_declaration_fields(POP | nulls)
    assert declaration is not None
    assert (declaration.prompt_jobs, declaration.features, declaration.image_transports) == (
        True,
        (),
        (),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_limits": None},
        {"chat_limits": []},
        {"chat_limits": {"max_context_length": 8192}},
        {"chat_limits": {"max_context_length": 0, "max_length": 1024}},
        {"chat_limits": {"max_context_length": 8192, "max_length": True}},
        {"chat_limits": {"max_context_length": 8192.0, "max_length": 1024}},
        {"chat_limits": {"max_context_length": 2**31, "max_length": 1024}},
        {
            "chat_limits": {
                "max_context_length": 8192,
                "max_length": 1024,
                "tools_max_temperature": -0.1,
            }
        },
        {
            "chat_limits": {
                "max_context_length": 8192,
                "max_length": 1024,
                "tools_max_temperature": "1",
            }
        },
        {"model_id": None},
        {"model_id": 1},
        {"model_id": ""},
        {"model_id": "x" * 256, "models": ["x" * 256]},
        {"models": None},
        {"chat_features": "seed"},
        {"chat_features": [1]},
        {"image_transports": {"url": True}},
        {"chat_jobs": 1},
        {"prompt_jobs": "no"},
        {"chat_jobs": False, "prompt_jobs": False},
    ],
)
def test_broken_declaration_is_refused_whole(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat_declaration_fields(POP | changes)
    assert refused.value.rc is ReturnCode.CHAT_DECLARATION_INVALID


def test_model_id_is_one_of_the_models_byte_for_byte() -> None:
    with pytest.raises(BadRequest) as refused:
        parse_chat_declaration_fields(POP | {"model_id": "koboldcpp/model_Q4"})
    assert (
        refused.value.message
        == "model_id 'koboldcpp/model_Q4' has to be one of the worker's models."
    )
