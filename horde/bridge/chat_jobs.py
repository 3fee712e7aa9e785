# SPDX-License-Identifier: AGPL-3.0-or-later
"""A chat job: fetch, check, count, generate, check again."""

import json
from dataclasses import dataclass, replace

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatGuarantee,
    chat_request_requirements,
    chat_service_gap,
)
from horde_sdk.worker.chat_declaration import (
    ChatFaultReason,
    ChatJobPayload,
    build_chat_reply_submit,
)

from horde.bridge.chat_body import ReplyForm, build_chat_body, choose_form
from horde.bridge.counting import CountedPrompt, find_chat_prompt, list_texts
from horde.bridge.inputs import InputFetcher, InputUnavailable
from horde.bridge.job import Connections, Job, JobFault, build_refusal_fault
from horde.bridge.overload import wait_out_overload
from horde.bridge.plan import ServingPlan
from horde.bridge.progress import ProgressPoster
from horde.bridge.refusals import BackendRefusal, UnreadableAnswer
from horde.bridge.replies import ChatReply
from horde.bridge.reply_checks import (
    check_reply_schema,
    check_reply_tools,
    limit_calls,
    list_offered,
    read_form,
)
from horde.bridge.streamed_reply import StreamedReply
from horde.bridge.streaming import StreamedGeneration
from horde.bridge.wire import get_messages, require_payload
from horde.json_text import JsonObject


def serve_chat_job(job: Job, connections: Connections, plan: ServingPlan) -> JsonObject:
    """Serve a chat; the submit's body. Raises as ``serve_job``."""
    backend = connections.backend
    chat = parse_chat_job(fetch_messages(job, connections.inputs), plan)
    form = choose_form(chat, plan)
    body = build_chat_body(chat, plan, form)
    try:
        # Images are not worth fetching for a text that does not fit.
        prompt = find_chat_prompt(backend, plan.profile, body)
        check_prompt_fits(prompt, chat, plan)
        body["messages"] = fetch_images(get_messages(body), connections.inputs)
        generation = ChatGeneration(
            job, connections, chat, form, prompt, build_poster(job, connections)
        )
        reply = wait_out_overload(lambda: generation.run(body), backend, job.lease)
    except BackendRefusal as refusal:
        texts = [*list_texts(chat.messages), json.dumps([chat.tools, chat.response_format])]
        raise build_refusal_fault(
            refusal, [*texts, *backend.secrets], is_constrained="response_format" in body
        ) from refusal
    except UnreadableAnswer as error:
        raise JobFault(ChatFaultReason.GENERATION_ERROR, str(error)) from error

    reply = limit_calls(read_form(reply, form), chat)
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


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """The generation of one job's reply, piece by piece if the horde wants to see it grow."""

    job: Job
    connections: Connections
    chat: ChatJobPayload
    form: ReplyForm
    prompt: CountedPrompt | None
    poster: ProgressPoster | None

    def run(self, body: JsonObject) -> ChatReply:
        """Generate, without keys that the backend refuses. Raises as ``StreamedGeneration.run``."""
        if self.job.is_streamed:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return self.connections.backend.refused_keys.send(body, self._attempt)

    def _attempt(self, body: JsonObject) -> ChatReply:
        job, is_read_along = self.job, self.job.is_streamed and self.form is ReplyForm.REPLY
        reply = StreamedReply(
            opens_reasoning=self.prompt.opens_reasoning if self.prompt else None,
            is_read_along=is_read_along,
            offered=list_offered(self.chat),
        )
        generation = StreamedGeneration(
            self.connections.backend.open_chat_stream(body, job.lease.seconds_left),
            reply,
            self.poster,
            job.lease,
            posts_content=is_read_along,
            may_fall_silent=bool(self.chat.tools) or not job.is_streamed,
        )
        try:
            return generation.run().build()
        except BackendRefusal as refusal:
            refusal.is_final = self.poster is not None and self.poster.has_begun
            raise


def build_poster(job: Job, connections: Connections) -> ProgressPoster | None:
    """Who posts what is written, if the horde wants to see it."""
    if not job.is_streamed:
        return None
    return ProgressPoster(job.job_id, job.lease, connections.post_progress)


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


def parse_chat_job(job: Job, plan: ServingPlan) -> ChatJobPayload:
    """Read the payload and hold it against the declaration; the horde should not have sent what
    does not match.

    Only features and limits are compared. A payload does not say its conformance, so a guarantee
    this worker does not declare may simply not have been asked for.
    """
    limits = plan.declaration.limits
    try:
        chat = ChatJobPayload.from_pop(job.body)
        requirements = chat_request_requirements(require_payload(job.body))
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


def check_prompt_fits(
    prompt: CountedPrompt | None, chat: ChatJobPayload, plan: ServingPlan
) -> None:
    """Give back a job whose prompt is over the request's context, or leaves no room for the reply
    in the worker's.

    A prompt nobody can count passes: what happens then is the backend's word, and declared only if
    the operator vouches for it. An estimate is held against the worker's context alone: for the
    request's the horde has made its own.
    """
    if prompt is None:
        return
    needed = prompt.token_count + chat.max_length
    is_over_request = not prompt.is_estimate and prompt.token_count > chat.max_context_length
    if is_over_request or needed > plan.profile.context_tokens:
        detail = f"{prompt.token_count} prompt tokens and {chat.max_length} of reply"
        raise JobFault(ChatFaultReason.PROMPT_OVERFLOW, detail)
