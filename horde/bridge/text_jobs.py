# SPDX-License-Identifier: AGPL-3.0-or-later
"""A text job: a prompt that is continued."""

from horde_sdk.worker.chat_declaration import ChatFaultReason

from horde.bridge.backend import Backend
from horde.bridge.counting import find_text_tokens
from horde.bridge.dialects import DIALECTS
from horde.bridge.job import Job, JobFault, build_refusal_fault
from horde.bridge.lease import Lease
from horde.bridge.overload import wait_out_overload
from horde.bridge.plan import ServingPlan
from horde.bridge.reasoning import clean_text
from horde.bridge.refusals import BackendRefusal
from horde.json_text import JsonObject


def serve_text_job(job: Job, backend: Backend, plan: ServingPlan) -> JsonObject:
    """Continue a prompt; ``{id, generation, state}``. Raises as ``serve_job``."""
    payload = job.body.get("payload")
    if not isinstance(payload, dict) or not isinstance(payload.get("prompt"), str):
        raise JobFault(ChatFaultReason.GENERATION_ERROR, "a text job without a prompt")
    try:
        body = build_text_body(payload, plan)
        body["prompt"] = fit_text_prompt(payload, backend, plan)
        completion = complete(body, backend, job.lease)
    except BackendRefusal as refusal:
        texts = [payload["prompt"], *backend.secrets]
        raise build_refusal_fault(refusal, texts) from refusal

    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    text = choice.get("text") if isinstance(choice, dict) else None
    if not isinstance(text, str):
        raise JobFault(ChatFaultReason.GENERATION_ERROR, "the backend's answer has no text")
    return {"id": job.job_id, "generation": clean_text(text), "state": "ok"}


def complete(body: JsonObject, backend: Backend, lease: Lease) -> JsonObject:
    """The backend's answer, asked again where that helps. Raises as ``Backend`` does."""
    return wait_out_overload(
        lambda: backend.refused_keys.send(
            body, lambda sent: backend.complete(sent, lease.seconds_left)
        ),
        backend,
        lease,
    )


def build_text_body(payload: JsonObject, plan: ServingPlan) -> JsonObject:
    """The backend's request without its prompt. What the client left out stays the backend's
    choice.
    """
    dialect = DIALECTS[plan.profile.kind]
    names = {
        "temperature": ("temperature",),
        "top_p": ("top_p",),
        **dialect.chat_sampling,
        **dialect.text_sampling,
    }
    body: JsonObject = {
        "model": plan.profile.backend_model,
        "max_tokens": _get_max_length(payload, plan),
        "stream": False,
    }
    body |= {
        name: payload[ours]
        for ours, theirs in names.items()
        for name in theirs
        if payload.get(ours) is not None
    }
    sent = payload.get("stop_sequence")
    stops = list(sent) if isinstance(sent, list) else []
    if payload.get("singleline"):
        stops.append("\n")
    if stops:
        body["stop"] = stops
    return body


def fit_text_prompt(payload: JsonObject, backend: Backend, plan: ServingPlan) -> str | list[int]:
    """The prompt, or its last tokens when it does not fit: text clients send whole stories and
    expect the beginning to go.

    The leading special tokens stay, since models run badly without them. A backend that cannot
    count gets the prompt whole.
    """
    prompt = str(payload["prompt"])
    profile = plan.profile
    context_tokens = min(
        _read_tokens(payload.get("max_context_length")) or profile.context_tokens,
        profile.context_tokens,
    )
    room = max(context_tokens - _get_max_length(payload, plan), 1)
    tokens = find_text_tokens(backend, profile, prompt)
    if tokens is None or len(tokens) <= room:
        return prompt
    leading = find_text_tokens(backend, profile, "") or []
    kept = max(room - len(leading), 1)
    return leading + tokens[-kept:]


def _get_max_length(payload: JsonObject, plan: ServingPlan) -> int:
    return min(_read_tokens(payload.get("max_length")) or plan.max_length, plan.max_length)


def _read_tokens(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
