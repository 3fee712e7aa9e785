# SPDX-License-Identifier: AGPL-3.0-or-later
"""From native text requests to OpenAI's text completions: whole objects, and chunks. Pure.

Source: docs/reference/front_completions.md, "Completion" and "Streams".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from horde.json_text import JsonObject
from horde.oai.mapping import (
    CHARACTERS_PER_COMPLETION_TOKEN,
    build_quote_x_horde,
    build_system_fingerprint,
    get_kudos,
    get_quoted_tokens,
)

TEXT_ID_PREFIX: Final = "cmpl-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """One generation of a native text request, as stored."""

    text: str
    state: str
    worker_id: str
    worker_name: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """Every generation of one native text request, and what they cost."""

    samples: tuple[TextSample, ...]
    kudos: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHead:
    """What is fixed before the reply. `created` is in whole Unix seconds, `request_ids` are in the
    order of the prompts.
    """

    request_ids: tuple[str, ...]
    created: int
    prompts: tuple[str, ...]
    sample_count: int
    max_tokens: int
    stops: tuple[str, ...]
    echo: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One text as the client gets it, without its prompt."""

    index: int
    text: str
    finish_reason: str
    sample: TextSample


def parse_samples(status: Mapping[str, object]) -> list[TextSample]:
    """The generations that a native status holds."""
    generations = status.get("generations")
    return [
        TextSample(
            text="" if generation.get("state") == "csam" else str(generation.get("text") or ""),
            state=str(generation.get("state")),
            worker_id=str(generation.get("worker_id")),
            worker_name=str(generation.get("worker_name")),
            model=str(generation.get("model")),
        )
        for generation in (generations if isinstance(generations, list) else ())
        if isinstance(generation, dict)
    ]


def count_estimated_tokens(text: str) -> int:
    """Text workers count no tokens, so they are estimated."""
    return -(-len(text) // CHARACTERS_PER_COMPLETION_TOKEN)


def build_choice(head: TextHead, index: int, sample: TextSample) -> Choice:
    """A generation cut at its first stop sequence, which text workers often leave in."""
    found = [position for stop in head.stops if (position := sample.text.find(stop)) >= 0]
    if sample.state in {"censored", "csam"}:
        reason = "content_filter"
    elif not found and count_estimated_tokens(sample.text) >= head.max_tokens:
        reason = "length"
    else:
        reason = "stop"
    return Choice(index, sample.text[: min(found)] if found else sample.text, reason, sample)


def list_choices(head: TextHead, replies: Sequence[TextReply]) -> list[Choice]:
    """Every choice in the order of its index: the samples of the first prompt come first."""
    samples = [sample for reply in replies for sample in reply.samples]
    return [build_choice(head, index, sample) for index, sample in enumerate(samples)]


def build_text_completion(head: TextHead, replies: Sequence[TextReply]) -> JsonObject:
    """The answer to a call that does not stream."""
    choices = list_choices(head, replies)
    return {
        **_build_frame(head, choices[0].sample),
        "choices": [
            _build_choice_object(
                choice.index, get_echo(head, choice.index) + choice.text, choice.finish_reason
            )
            for choice in choices
        ],
        "usage": build_text_usage(head, choices),
        "x_horde": build_text_x_horde(head, replies),
    }


def get_echo(head: TextHead, index: int) -> str:
    """The prompt of a choice when the client asked for it, else nothing."""
    return head.prompts[index // head.sample_count] if head.echo else ""


def _build_frame(head: TextHead, sample: TextSample) -> JsonObject:
    return {
        "id": TEXT_ID_PREFIX + head.request_ids[0],
        "object": "text_completion",
        "created": head.created,
        "model": sample.model,
        "system_fingerprint": build_system_fingerprint(sample.worker_id, sample.model),
    }


def _build_choice_object(index: int, text: str, finish_reason: str | None) -> JsonObject:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": finish_reason}


def build_text_usage(head: TextHead, choices: Sequence[Choice]) -> JsonObject:
    """Estimates: each prompt once, and every choice."""
    prompt_tokens = sum(map(count_estimated_tokens, head.prompts))
    completion_tokens = sum(count_estimated_tokens(choice.text) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def build_text_x_horde(head: TextHead, replies: Sequence[TextReply]) -> JsonObject:
    """Who served which of the native requests, and what each cost."""
    return {
        "requests": [
            {
                "request_id": request_id,
                "kudos": reply.kudos,
                "generations": [
                    {
                        "worker_id": sample.worker_id,
                        "worker_name": sample.worker_name,
                        "model": sample.model,
                    }
                    for sample in reply.samples
                ],
            }
            for request_id, reply in zip(head.request_ids, replies, strict=True)
        ],
        "estimated_usage": True,
    }


def build_text_chunks(head: TextHead, choice: Choice) -> Iterator[JsonObject]:
    """The chunks of one choice, but for its finish: the prompt where it is wanted, and the text."""
    for text in (get_echo(head, choice.index), choice.text):
        if text:
            yield _build_chunk(head, choice, _build_choice_object(choice.index, text, None))


def build_finish_chunk(head: TextHead, choice: Choice) -> JsonObject:
    """The last chunk of one choice."""
    return _build_chunk(head, choice, _build_choice_object(choice.index, "", choice.finish_reason))


def build_usage_chunk(head: TextHead, replies: Sequence[TextReply]) -> JsonObject:
    """The last chunk of a stream whose client asked for usage."""
    choices = list_choices(head, replies)
    chunk = _build_chunk(head, choices[0], None)
    return chunk | {"usage": build_text_usage(head, choices)}


def _build_chunk(head: TextHead, choice: Choice, shown: JsonObject | None) -> JsonObject:
    """One chunk; `usage` is there, as null, only when it was asked for."""
    chunk = {**_build_frame(head, choice.sample), "choices": [] if shown is None else [shown]}
    return chunk | {"usage": None} if head.include_usage else chunk


def build_text_quote(
    quotes: Sequence[Mapping[str, object]],
    *,
    completion_id: str,
    created: int,
    model: str,
) -> JsonObject:
    """The answer to a dry run: a completion without choices, whose price is the sum of all."""
    resolved = [build_quote_x_horde(quote)["resolved"] for quote in quotes]
    tokens = sum(map(get_quoted_tokens, quotes))
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        "system_fingerprint": None,
        "x_horde": {
            "requests": [],
            "kudos": sum(map(get_kudos, quotes)),
            "estimated_usage": True,
            "dry_run": True,
            "resolved": resolved,
        },
    }
