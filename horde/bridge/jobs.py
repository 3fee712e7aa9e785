# SPDX-License-Identifier: AGPL-3.0-or-later
"""One job: from what the horde popped to the body to submit.

``serve_chat_job`` and ``serve_text_job`` return the finished submit, or raise ``JobFault`` for a
job this worker gives back, ``BackendUnavailable`` when the backend is gone, or ``JobAbandoned`` for
a streamed job that needs no submit any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatGuarantee,
    ChatResponseFormatType,
    ChatToolChoiceMode,
    chat_request_requirements,
    chat_service_gap,
)
from horde_sdk.worker.chat_declaration import (
    ChatFaultReason,
    ChatFinishReason,
    ChatJobPayload,
    build_chat_fault_submit,
    build_chat_reply_submit,
)

from horde.bridge.backend import Backend, BackendKind, BackendRefusal, JsonObject, RenderedPrompt
from horde.bridge.inputs import InputFetcher, InputUnavailable, leave_out_images
from horde.bridge.lease import DEFAULT_LEASE_SECONDS, Lease
from horde.bridge.probe import ServingPlan
from horde.bridge.progress import PostProgress, ProgressPoster
from horde.bridge.replies import ChatReply, build_tool_call, clean_text, parse_chat_reply
from horde.bridge.schema_check import matches_schema
from horde.bridge.streamed_reply import StreamedReply
from horde.bridge.streaming import StreamedGeneration
from horde.bridge.tool_grammar import build_tool_call_schema, parse_forced_call

# Sampling keys beyond OpenAI's are spelled differently by each backend: the payload's name, then
# theirs.
_CHAT_SAMPLING = {
    BackendKind.LLAMA_CPP: {"top_k": "top_k", "min_p": "min_p", "rep_pen": "repeat_penalty"},
    BackendKind.VLLM: {"top_k": "top_k", "min_p": "min_p", "rep_pen": "repetition_penalty"},
    BackendKind.OTHER: {"top_k": "top_k", "min_p": "min_p", "rep_pen": "repeat_penalty"},
}
_TEXT_SAMPLING = {
    BackendKind.LLAMA_CPP: {
        "typical": "typical_p",
        "rep_pen_range": "repeat_last_n",
        "dynatemp_range": "dynatemp_range",
        "dynatemp_exponent": "dynatemp_exponent",
    },
    BackendKind.VLLM: {},
    BackendKind.OTHER: {},
}


class JobFault(Exception):
    """This worker cannot serve the job. ``detail`` is for the worker's log and holds nothing of the
    request.

    ``reason`` is None where the horde has no word for it. ``is_backend_trouble`` says that the next
    job may fare the same.
    """

    def __init__(
        self, reason: ChatFaultReason | None, detail: str, *, is_backend_trouble: bool = False
    ) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.is_backend_trouble = reason, detail, is_backend_trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A popped job with its lease."""

    job_id: str
    is_chat: bool
    model: str
    body: JsonObject
    lease: Lease

    @property
    def is_streamed(self) -> bool:
        """Whether the horde wants to know what is written before it is submitted."""
        payload = self.body.get("payload")
        return self.is_chat and isinstance(payload, dict) and payload.get("stream_progress") is True

    def build_fault(self, reason: ChatFaultReason | None) -> JsonObject:
        """The submit that gives the job back. A text job's form is the one text workers send, which
        carries no reason.
        """
        if not self.is_chat:
            return {"id": self.job_id, "state": "faulted", "generation": "faulted"}
        if reason is None:
            return {"id": self.job_id, "state": "faulted", "model_id": self.model}
        return build_chat_fault_submit(self.job_id, self.model, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Whom a job may talk to. ``post_progress`` sends what a streamed job has written so far."""

    backend: Backend
    inputs: InputFetcher
    post_progress: PostProgress


def parse_job(answer: JsonObject, plan: ServingPlan) -> Job:
    """Read a pop's answer that has an ``id``."""
    lease_seconds = answer.get("ttl")
    has_lease = (
        isinstance(lease_seconds, int | float)
        and not isinstance(lease_seconds, bool)
        and lease_seconds > 0
    )
    return Job(
        job_id=str(answer["id"]),
        is_chat=answer.get("chat") is True,
        model=str(answer.get("model") or plan.model),
        body=answer,
        lease=Lease(float(lease_seconds) if has_lease and lease_seconds else DEFAULT_LEASE_SECONDS),
    )


def serve_job(job: Job, connections: Connections, plan: ServingPlan) -> JsonObject:
    """Serve a job of either kind; the submit's body."""
    return (
        serve_chat_job(job, connections, plan)
        if job.is_chat
        else serve_text_job(job, connections.backend, plan)
    )


def serve_chat_job(job: Job, connections: Connections, plan: ServingPlan) -> JsonObject:
    """Fetch, check, count, generate, check again. Errors as the module says."""
    backend = connections.backend
    chat = parse_chat_job(fetch_messages(job, connections.inputs), plan)
    forces_call = is_call_forced_by_schema(chat, plan)
    body = build_chat_body(chat, plan, forces_call=forces_call)
    try:
        # Images are counted by nobody but the backend, and not worth fetching for a text that does
        # not fit.
        prompt = backend.find_chat_prompt(
            plan.profile.kind, {**body, "messages": leave_out_images(body["messages"])}
        )
        check_prompt_fits(prompt, chat, plan)
        opens_reasoning = prompt.opens_reasoning if prompt else None
        body["messages"] = fetch_images(body["messages"], connections.inputs)
        if job.is_streamed:
            post = connections.post_progress
            reply = stream_chat(
                job,
                backend,
                body,
                post,
                opens_reasoning=opens_reasoning,
                posts_content=not forces_call,
            )
        else:
            reply = run_chat(job, backend, body, opens_reasoning=opens_reasoning)
    except BackendRefusal as refusal:
        raise build_refusal_fault(refusal, is_constrained="response_format" in body) from refusal
    if forces_call:
        reply = build_forced_reply(reply)
    reply = limit_calls(reply, chat)
    check_reply_tools(reply, chat)
    check_reply_schema(reply, chat)
    return build_chat_reply_submit(
        job.job_id,
        job.model,
        reply.build_message(),
        reply.finish_reason,
        reply.usage,
        native_finish_reason=reply.native_finish_reason,
    )


def fetch_messages(job: Job, inputs: InputFetcher) -> Job:
    """The job with its messages, which a large conversation keeps in the horde's store."""
    payload = job.body.get("payload")
    if not isinstance(payload, dict) or payload.get("messages_url") is None:
        return job
    try:
        messages = inputs.fetch_messages(payload["messages_url"])
    except InputUnavailable as error:
        raise JobFault(None, f"messages: {error}") from error
    return replace(job, body={**job.body, "payload": {**payload, "messages": messages}})


def fetch_images(messages: list[JsonObject], inputs: InputFetcher) -> list[JsonObject]:
    """The messages with their images inside."""
    try:
        return inputs.inline_images(messages)
    except InputUnavailable as error:
        raise JobFault(None, f"image: {error}") from error


def run_chat(
    job: Job, backend: Backend, body: JsonObject, *, opens_reasoning: bool | None
) -> ChatReply:
    """Generate a reply in one piece."""
    completion = backend.chat(body, job.lease.seconds_left)
    try:
        return parse_chat_reply(completion, opens_reasoning=opens_reasoning)
    except ValueError as error:
        raise JobFault(ChatFaultReason.GENERATION_ERROR, str(error)) from error


def stream_chat(
    job: Job,
    backend: Backend,
    body: JsonObject,
    post: PostProgress,
    *,
    opens_reasoning: bool | None,
    posts_content: bool,
) -> ChatReply:
    """Generate a reply piece by piece and post what is there; the reply begins with what was
    posted.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    generation = StreamedGeneration(
        backend.open_chat_stream(body, job.lease.seconds_left),
        StreamedReply(opens_reasoning=opens_reasoning),
        ProgressPoster(job.job_id, job.lease, post),
        job.lease,
        posts_content=posts_content,
    )
    return generation.run().build()


def parse_chat_job(job: Job, plan: ServingPlan) -> ChatJobPayload:
    """Read the payload and hold it against the declaration; the horde should not have sent what
    does not match.

    Only features and limits are compared. A payload does not say its conformance, so a guarantee
    this worker does not declare may simply not have been asked for.
    """
    limits = plan.declaration.limits
    try:
        chat = ChatJobPayload.from_pop(job.body)
        requirements = chat_request_requirements(job.body["payload"])
    except (KeyError, TypeError, ValueError) as error:
        raise JobFault(
            ChatFaultReason.GENERATION_ERROR, f"unreadable payload: {type(error).__name__}"
        ) from error
    if limits is None:
        raise JobFault(ChatFaultReason.GENERATION_ERROR, "a chat job for a worker that takes none")
    declared = {value.value for value in plan.declaration.features} | {
        guarantee.value for guarantee in ChatGuarantee
    }
    if (gap := chat_service_gap(requirements, declared, limits)) or (
        missing := chat.undeclared_features(plan.declaration)
    ):
        names = (*gap.missing_declarations, *gap.exceeded_limits) if gap else sorted(missing)
        raise JobFault(ChatFaultReason.GENERATION_ERROR, f"not declared: {', '.join(names)}")
    return chat


def is_call_forced_by_schema(chat: ChatJobPayload, plan: ServingPlan) -> bool:
    """Whether the bridge has to enforce the tool choice. Only llama.cpp needs it; others are taken
    at the operator's word.
    """
    mode = chat.requirements.traits.tool_choice_mode
    forces = bool(chat.tools) and mode in (ChatToolChoiceMode.REQUIRED, ChatToolChoiceMode.FUNCTION)
    return forces and plan.profile.kind is BackendKind.LLAMA_CPP


def build_chat_body(chat: ChatJobPayload, plan: ServingPlan, *, forces_call: bool) -> JsonObject:
    """The backend's request. Every sampling value is sent, so that no default of the backend
    applies.
    """
    body: JsonObject = {
        "model": plan.profile.backend_model,
        "messages": [_drop_nulls(message) for message in chat.messages],
        "max_tokens": chat.max_length,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "frequency_penalty": chat.frequency_penalty,
        "presence_penalty": chat.presence_penalty,
        "stream": False,
    }
    for payload_key, backend_key in _CHAT_SAMPLING[plan.profile.kind].items():
        body[backend_key] = getattr(chat, payload_key)
    optional = {
        "stop": chat.stop_sequence,
        "seed": chat.seed,
        "response_format": chat.response_format,
    }
    body |= {key: value for key, value in optional.items() if value is not None}
    if chat.reasoning_effort is not None:
        body["reasoning_effort"] = chat.reasoning_effort
        if chat.reasoning_effort == "none":
            body["chat_template_kwargs"] = {"enable_thinking": False}  # the templates' own switch
    if chat.tools:
        body |= _build_tool_keys(chat, forces_call=forces_call)
    return body


def _build_tool_keys(chat: ChatJobPayload, *, forces_call: bool) -> JsonObject:
    """The tools, so that the template renders them; a forced call is asked for as JSON instead of
    as a call.
    """
    keys: JsonObject = {"tools": list(chat.tools or ())}
    if forces_call:
        schema = build_tool_call_schema(keys["tools"])
        return keys | {
            "tool_choice": "none",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "tool_call", "strict": True, "schema": schema},
            },
        }
    if chat.tool_choice is not None:
        keys["tool_choice"] = chat.tool_choice
    if chat.parallel_tool_calls is not None:
        keys["parallel_tool_calls"] = chat.parallel_tool_calls
    return keys


def _drop_nulls(message: Mapping[str, Any]) -> JsonObject:
    """A null content stays, beside calls it is the rule; any other null key makes llama.cpp answer
    500.
    """
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def check_prompt_fits(
    prompt: RenderedPrompt | None, chat: ChatJobPayload, plan: ServingPlan
) -> None:
    """Give back a job whose prompt is over the request's context, or leaves no room for the reply
    in the worker's.

    A prompt nobody can count passes: what happens then is the backend's word, and declared only if
    the operator vouches for it.
    """
    if prompt is None:
        return
    needed = prompt.token_count + chat.max_length
    if prompt.token_count > chat.max_context_length or needed > plan.profile.context_tokens:
        detail = f"{prompt.token_count} prompt tokens and {chat.max_length} of reply"
        raise JobFault(ChatFaultReason.PROMPT_OVERFLOW, detail)


def build_refusal_fault(refusal: BackendRefusal, *, is_constrained: bool) -> JobFault:
    """Why the backend would not: too long, a format it cannot build, or anything else."""
    if refusal.is_context_overflow:
        return JobFault(ChatFaultReason.PROMPT_OVERFLOW, "refused by the backend")
    if is_constrained and refusal.is_grammar_refusal:
        return JobFault(
            ChatFaultReason.UNBUILDABLE_GRAMMAR, f"the backend answered {refusal.status}"
        )
    detail = f"the backend answered {refusal.status}"
    # 400 is about this request. Anything else (no such model, not allowed, overloaded, crashed) is
    # about the backend.
    return JobFault(
        ChatFaultReason.GENERATION_ERROR, detail, is_backend_trouble=refusal.status != 400
    )


def build_forced_reply(reply: ChatReply) -> ChatReply:
    """Turn a reply to the tool call schema into the call it spells."""
    call = parse_forced_call(reply.content or "")
    if call is None:
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "no call in a reply that needs one")
    is_cut = reply.finish_reason is ChatFinishReason.LENGTH
    return replace(
        reply,
        content=None,
        tool_calls=[build_tool_call(call["name"], call["arguments"])],
        finish_reason=ChatFinishReason.LENGTH if is_cut else ChatFinishReason.TOOL_CALLS,
    )


def limit_calls(reply: ChatReply, chat: ChatJobPayload) -> ChatReply:
    """Keep the first call where the client wants no parallel ones: that is what
    ``single_tool_call_enforced`` promises.
    """
    if chat.requirements.traits.parallel_tool_calls or len(reply.tool_calls) < 2:
        return reply
    return replace(reply, tool_calls=reply.tool_calls[:1])


def check_reply_tools(reply: ChatReply, chat: ChatJobPayload) -> None:
    """Give back a reply that calls what was not offered, or calls nothing where a call is
    required.
    """
    offered = {tool["function"]["name"] for tool in chat.tools or ()}
    if any(call["function"]["name"] not in offered for call in reply.tool_calls):
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "a call to a function that was not offered")
    needs_call = (
        offered and chat.requirements.traits.tool_choice_mode is not ChatToolChoiceMode.AUTO
    )
    if needs_call and not reply.tool_calls:
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "no call in a reply that needs one")


def check_reply_schema(reply: ChatReply, chat: ChatJobPayload) -> None:
    """Give back a reply that a strict schema rules out: the backend's grammar left a part of the
    schema out.

    A reply cut at its length is not judged. It is unfinished JSON by necessity: a strict request
    has it refused by the horde, which records why, and any other client gets what OpenAI would
    send.
    """
    traits = chat.requirements.traits
    if (
        traits.response_format_type is not ChatResponseFormatType.JSON_SCHEMA
        or not traits.strict_schema
    ):
        return
    if reply.finish_reason is ChatFinishReason.LENGTH or (reply.tool_calls and not reply.content):
        return
    schema = (chat.response_format or {})["json_schema"].get("schema")
    if not matches_schema(reply.content or "", schema):
        raise JobFault(ChatFaultReason.UNBUILDABLE_GRAMMAR, "the reply does not match the schema")


def serve_text_job(job: Job, backend: Backend, plan: ServingPlan) -> JsonObject:
    """Continue a prompt; ``{id, generation, state}``. Errors as the module says."""
    payload = job.body.get("payload")
    if not isinstance(payload, dict) or not isinstance(payload.get("prompt"), str):
        raise JobFault(ChatFaultReason.GENERATION_ERROR, "a text job without a prompt")
    try:
        body = build_text_body(payload, plan)
        body["prompt"] = fit_text_prompt(payload, backend, plan, max_length=body["max_tokens"])
        completion = backend.complete(body, job.lease.seconds_left)
    except BackendRefusal as refusal:
        raise build_refusal_fault(refusal, is_constrained=False) from refusal
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    text = choice.get("text") if isinstance(choice, dict) else None
    if not isinstance(text, str):
        raise JobFault(ChatFaultReason.GENERATION_ERROR, "the backend's answer has no text")
    return {"id": job.job_id, "generation": clean_text(text), "state": "ok"}


def build_text_body(payload: JsonObject, plan: ServingPlan) -> JsonObject:
    """The backend's request without its prompt. What the client left out stays the backend's
    choice.
    """
    kind = plan.profile.kind
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        **_CHAT_SAMPLING[kind],
        **_TEXT_SAMPLING[kind],
    }
    body: JsonObject = {
        "model": plan.profile.backend_model,
        "max_tokens": min(
            _read_tokens(payload.get("max_length")) or plan.max_length, plan.max_length
        ),
        "stream": False,
    }
    body |= {
        theirs: payload[ours] for ours, theirs in names.items() if payload.get(ours) is not None
    }
    stops = list(payload.get("stop_sequence") or ())
    if payload.get("singleline"):
        stops.append("\n")
    if stops:
        body["stop"] = stops
    return body


def fit_text_prompt(
    payload: JsonObject, backend: Backend, plan: ServingPlan, *, max_length: int
) -> str | list[int]:
    """The prompt, or its last tokens when it does not fit: text clients send whole stories and
    expect the beginning to go.

    The leading special tokens stay, since models run badly without them. A backend that cannot
    count gets the prompt whole.
    """
    prompt: str = payload["prompt"]
    profile = plan.profile
    context_tokens = min(
        _read_tokens(payload.get("max_context_length")) or profile.context_tokens,
        profile.context_tokens,
    )
    room = max(context_tokens - max_length, 1)
    tokens = backend.find_text_tokens(profile.kind, prompt, profile.backend_model)
    if tokens is None or len(tokens) <= room:
        return prompt
    leading = backend.find_text_tokens(profile.kind, "", profile.backend_model) or []
    kept = max(room - len(leading), 1)
    return leading + tokens[-kept:]


def _read_tokens(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
