# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the status routes: which models are listed, and the horde in numbers."""

from enum import StrEnum
from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field

from horde.shapes.base import ModelType, Query


class ModelState(StrEnum):
    """Which models a list holds: all, those of the reference, or the others."""

    ALL = "all"
    KNOWN = "known"
    CUSTOM = "custom"


class ModelsQuery(Query):
    """The query string of the model list."""

    type: ModelType = ModelType.IMAGE
    min_count: Annotated[int | None, Field(description="Leave out models with fewer threads.")] = (
        None
    )
    max_count: Annotated[int | None, Field(description="Leave out models with more threads.")] = (
        None
    )
    model_state: ModelState = ModelState.ALL
    chat: Annotated[bool, Field(description="List what chat workers offer; needs type=text.")] = (
        False
    )


class OfferedChat(TypedDict):
    """What chat workers offer of a model."""

    workers: Annotated[
        int,
        Field(
            description="Online workers, out of maintenance, that serve chat jobs with the model."
        ),
    ]
    max_context_length: Annotated[
        int | None, Field(description="The largest context among them, in tokens.")
    ]
    max_length: Annotated[
        int | None, Field(description="The longest output among them, in tokens.")
    ]
    features: Annotated[list[str], Field(description="All they declare together, sorted.")]
    created: Annotated[
        int | None,
        Field(description="Unix seconds at which the earliest of them was created, or null."),
    ]


class ActiveModel(TypedDict):
    """An entry of the model list."""

    name: Annotated[str, Field(description="The name workers offer it by, byte for byte.")]
    count: Annotated[int, Field(description="Threads of the online workers that serve it.")]
    performance: Annotated[
        float, Field(description="Tokens per second, averaged over the last hour.")
    ]
    queued: Annotated[float, Field(description="Tokens of the waiting requests that name it.")]
    jobs: Annotated[float, Field(description="Generations waiting and in flight.")]
    eta: Annotated[
        int,
        Field(
            description=(
                "Seconds until what is queued is done; 10000 when nobody has served it lately."
            )
        ),
    ]
    type: Literal["image", "text"]
    chat: NotRequired[Annotated[OfferedChat, Field(description="Only with chat=true.")]]


class HordePerformance(TypedDict):
    """The horde in numbers. This one takes no image or alchemy work: those are 0."""

    queued_requests: Annotated[int, Field(description="Image generations waiting.")]
    queued_text_requests: Annotated[
        int, Field(description="Text generations waiting and in flight.")
    ]
    worker_count: Annotated[int, Field(description="Online image workers.")]
    text_worker_count: Annotated[int, Field(description="Online text workers.")]
    thread_count: Annotated[int, Field(description="Threads of the online image workers.")]
    text_thread_count: Annotated[int, Field(description="Threads of the online text workers.")]
    queued_megapixelsteps: Annotated[float, Field(description="Image work waiting.")]
    past_minute_megapixelsteps: Annotated[
        float, Field(description="Image work delivered in the last minute.")
    ]
    queued_forms: Annotated[float, Field(description="Alchemy forms waiting.")]
    interrogator_count: Annotated[int, Field(description="Online alchemists.")]
    interrogator_thread_count: Annotated[
        int, Field(description="Threads of the online alchemists.")
    ]
    queued_tokens: Annotated[float, Field(description="Tokens of the waiting text requests.")]
    past_minute_tokens: Annotated[float, Field(description="Tokens delivered in the last minute.")]
