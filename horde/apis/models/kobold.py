# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the text and chat routes, for the document. The routes validate by themselves."""

from collections.abc import Callable
from typing import Any

from flask_restx import Namespace, fields

REFUSALS = {
    400: "The request as sent can never be served; `errors` when the body breaks its schema.",
    401: "No account has the key.",
    403: "Not allowed, or not now.",
    404: "Nothing there by this id or name.",
    409: "Not what comes next.",
    413: "The body is over its bound.",
    415: "The body is not JSON, or encoded.",
    429: "Too many requests: without `rc` a rate limit, else too many generations waiting.",
    503: "A part that is needed is away, or switched off.",
}
BODY_REFUSALS = (400, 413, 415, 429, 503)


def document_refusals(namespace: Namespace, *statuses: int) -> Callable[[Any], Any]:
    """A decorator that adds refusals to the document of a method."""
    refusal = namespace.model(
        "RequestError",
        {
            "message": fields.String(required=True, description="For people."),
            "rc": fields.String(description="For programs; see the list of return codes."),
            "errors": fields.Raw(description="From path to text, when the body breaks its schema."),
        },
    )

    def decorate(method: Any) -> Any:
        for status in statuses:
            method = namespace.response(status, REFUSALS[status], refusal)(method)
        return method

    return decorate


def build_text_request(namespace: Namespace) -> Any:
    """A text request."""
    params = namespace.model(
        "ModelPayloadKobold",
        {
            "n": fields.Integer(min=1, max=20, default=1, description="Generations."),
            "max_length": fields.Integer(
                min=16, max=16384, default=80, description="Tokens to generate."
            ),
            "max_context_length": fields.Integer(min=80, max=1048576, default=2048),
            "temperature": fields.Float(min=0, max=5),
            "top_p": fields.Float(min=0.001, max=1),
            "top_k": fields.Integer(min=0, max=200),
            "top_a": fields.Float(min=0, max=1),
            "min_p": fields.Float(min=0, max=1),
            "tfs": fields.Float(min=0, max=1),
            "typical": fields.Float(min=0, max=1),
            "rep_pen": fields.Float(min=1, max=3),
            "rep_pen_range": fields.Integer(min=0, max=4096),
            "rep_pen_slope": fields.Float(min=0, max=10),
            "sampler_order": fields.List(
                fields.Integer, description="At least seven different samplers."
            ),
            "stop_sequence": fields.List(
                fields.String, description="At most 128, 2000 characters together."
            ),
            "smoothing_factor": fields.Float(min=0, max=10),
            "dynatemp_range": fields.Float(min=0, max=5),
            "dynatemp_exponent": fields.Float(min=0, max=5),
            "singleline": fields.Boolean,
            "frmtadsnsp": fields.Boolean,
            "frmtrmblln": fields.Boolean,
            "frmtrmspch": fields.Boolean,
            "frmttriminc": fields.Boolean,
            "use_default_badwordsids": fields.Boolean,
        },
    )
    return namespace.model(
        "GenerationInputKobold",
        {
            "prompt": fields.String(required=True),
            "params": fields.Nested(params),
            "models": fields.List(
                fields.String, description="Any of them may serve it; empty accepts every model."
            ),
            "trusted_workers": fields.Boolean(default=False),
            "validated_backends": fields.Boolean(default=False),
            "slow_workers": fields.Boolean(default=True, description="False needs kudos upfront."),
            "workers": fields.List(fields.String, description="Worker ids; the first five count."),
            "worker_blacklist": fields.Boolean(
                default=False, description="Makes `workers` a deny list."
            ),
            "dry_run": fields.Boolean(
                default=False, description="Answer the price without queueing."
            ),
            "context_fit": fields.String(enum=["ignore", "reject", "grow"], default="ignore"),
            "allow_downgrade": fields.Boolean(
                default=False, description="Lower the output rather than refuse for kudos."
            ),
            "webhook": fields.String(
                max_length=1024, description="An https address told of each generation."
            ),
            "proxied_account": fields.String(max_length=255, description="Service accounts only."),
            "extra_source_images": fields.List(fields.Raw, description="Refused on text."),
            "disable_batching": fields.Boolean(
                default=False, description="Trusted users only when n is above 1."
            ),
            "nsfw": fields.Boolean(default=True, description="Accepted and not applied."),
            "extra_slow_workers": fields.Boolean(
                default=False, description="Accepted and not applied."
            ),
            "softprompt": fields.String(min_length=1, description="Accepted and not applied."),
            "style": fields.String(min_length=3, max_length=1024),
            "template_fields": fields.Raw(
                description="Names to strings: what the template asks for."
            ),
        },
    )


def build_sent_text_request(namespace: Namespace) -> Any:
    """A text request read back."""
    return namespace.model(
        "SentRequestKobold",
        {
            "prompt": fields.String(description="As sent. Absent where it was not kept."),
            "params": fields.Raw(description="As sent, without unknown keys and nulls."),
            "models": fields.List(fields.String),
            "workers": fields.List(fields.String),
            "worker_blacklist": fields.Boolean,
            "trusted_workers": fields.Boolean,
            "validated_backends": fields.Boolean,
            "slow_workers": fields.Boolean,
            "extra_slow_workers": fields.Boolean,
            "disable_batching": fields.Boolean,
            "softprompt": fields.String,
            "webhook": fields.String,
            "proxied_account": fields.String,
        },
    )


def build_chat_request(namespace: Namespace) -> Any:
    """A chat request."""
    options = namespace.model(
        "ChatHordeOptions",
        {
            "only": fields.List(fields.String, description="Only these workers."),
            "ignore": fields.List(fields.String, description="Never these workers."),
            "trusted_workers": fields.Boolean(default=False),
            "validated_backends": fields.Boolean(default=False),
            "slow_workers": fields.Boolean(default=True),
            "max_context_length": fields.Integer(min=1),
            "context_fit": fields.String(
                enum=["grow", "reject", "truncate_oldest"], default="truncate_oldest"
            ),
            "conformance": fields.String(enum=["strict", "best_effort"], default="strict"),
            "openai_guards": fields.Boolean(default=False),
            "include_reasoning": fields.Boolean(default=True),
            "availability_mode": fields.String(enum=["wait", "fail_fast"], default="wait"),
            "max_kudos": fields.Integer(min=1),
            "dry_run": fields.Boolean(default=False),
            "operation_key": fields.String(
                description="A UUID that makes a repeated submit the same request."
            ),
        },
    )
    return namespace.model(
        "ChatRequest",
        {
            "model": fields.String(description="Exactly one of model and models."),
            "models": fields.List(fields.String, description="1 to 5 models."),
            "messages": fields.List(fields.Raw, required=True),
            "max_tokens": fields.Integer(min=16, max=16384, default=512),
            "max_completion_tokens": fields.Integer(min=16, max=16384),
            "temperature": fields.Float(min=0, max=5),
            "top_p": fields.Float(min=0.001, max=1),
            "frequency_penalty": fields.Float(min=-2, max=2),
            "presence_penalty": fields.Float(min=-2, max=2),
            "seed": fields.Integer,
            "reasoning_effort": fields.String(
                enum=["none", "minimal", "low", "medium", "high", "xhigh"]
            ),
            "stop": fields.Raw(description="A string or an array of strings."),
            "n": fields.Integer(min=1, max=1),
            "stream": fields.Boolean,
            "stream_options": fields.Raw,
            "user": fields.String,
            "metadata": fields.Raw,
            "tools": fields.List(fields.Raw),
            "tool_choice": fields.Raw,
            "parallel_tool_calls": fields.Boolean,
            "response_format": fields.Raw,
            "horde": fields.Nested(options),
        },
    )


def build_accepted(namespace: Namespace) -> Any:
    """The answer to a queued request."""
    return namespace.model(
        "RequestAsync",
        {
            "id": fields.String(
                description="Follow the request with it; whoever has it can read the reply."
            ),
            "kudos": fields.Float(description="The price to expect."),
            "message": fields.String(
                description="Only when no online worker can take the request."
            ),
        },
    )


def build_quote(namespace: Namespace) -> Any:
    """The answer to a dry run, or to a repeated operation key."""
    return namespace.model(
        "RequestQuote",
        {
            "kudos": fields.Float,
            "id": fields.String,
            "resolved": fields.Raw(description="The request as it would run."),
        },
    )


def _status_fields() -> dict[str, Any]:
    return {
        "finished": fields.Integer,
        "processing": fields.Integer,
        "restarted": fields.Integer,
        "waiting": fields.Integer,
        "done": fields.Boolean,
        "faulted": fields.Boolean,
        "wait_time": fields.Integer(description="Seconds."),
        "queue_position": fields.Integer(description="From 1; 0 when nothing waits."),
        "kudos": fields.Float(description="Paid so far."),
        "is_possible": fields.Boolean(
            description="A worker holds a job of it, or could take one now."
        ),
        "eligible_workers": fields.Integer,
        "eligible_worker_threads": fields.Integer,
        "might_stall": fields.Boolean,
    }


def _generation_fields() -> dict[str, Any]:
    return {
        "text": fields.String,
        "seed": fields.Integer,
        "gen_metadata": fields.List(fields.Raw),
        "worker_id": fields.String,
        "worker_name": fields.String,
        "model": fields.String,
        "state": fields.String(enum=["ok", "censored", "csam"]),
    }


def build_text_status(namespace: Namespace) -> Any:
    """Where a text request stands."""
    generation = namespace.model("GenerationKobold", _generation_fields())
    return namespace.model(
        "RequestStatusKobold",
        {"generations": fields.List(fields.Nested(generation)), **_status_fields()},
    )


def build_chat_status(namespace: Namespace) -> Any:
    """Where a chat request stands."""
    generation = namespace.model(
        "GenerationChat",
        {
            "message": fields.Raw(
                description="The reply: role, content, tool_calls, reasoning_content."
            ),
            "finish_reason": fields.String(enum=["stop", "length", "content_filter", "tool_calls"]),
            "native_finish_reason": fields.String,
            "prompt_tokens": fields.Integer,
            "completion_tokens": fields.Integer,
            "reasoning_tokens": fields.Integer,
            "charge_basis": fields.String,
            "queue_wait_seconds": fields.Float,
            **_generation_fields(),
        },
    )
    return namespace.model(
        "RequestStatusChat",
        {
            "generations": fields.List(fields.Nested(generation)),
            "context_adjustments": fields.List(fields.Raw),
            "impossible_reason": fields.Raw,
            "speed_limit": fields.Raw(
                description="Present only while speed alone keeps every worker from the request."
            ),
            "fault_reason": fields.String,
            "fault_rc": fields.String,
            **_status_fields(),
        },
    )


def build_pop_input(namespace: Namespace) -> Any:
    """What a worker says when it asks for a job."""
    limits = namespace.model(
        "ChatLimitsInput",
        {
            "max_context_length": fields.Integer(min=1, required=True),
            "max_length": fields.Integer(min=1, required=True),
            "tools_max_temperature": fields.Float(min=0),
        },
    )
    return namespace.model(
        "PopInputKobold",
        {
            "name": fields.String(required=True),
            "models": fields.List(fields.String, description="At least one; the first 200 count."),
            "bridge_agent": fields.String(
                default="unknown:0:unknown", description="name:version:url"
            ),
            "threads": fields.Integer(min=1, max=50, default=1),
            "amount": fields.Integer(
                min=1, max=20, default=1, description="Generations of one request; 1 on chat."
            ),
            "nsfw": fields.Boolean(default=True),
            "priority_usernames": fields.List(fields.String, description="name#id"),
            "max_length": fields.Integer(default=512),
            "max_context_length": fields.Integer(default=2048),
            "softprompts": fields.List(fields.String, description="Accepted and not applied."),
            "chat_jobs": fields.Boolean(default=False),
            "prompt_jobs": fields.Boolean(default=True),
            "chat_features": fields.List(fields.String),
            "chat_limits": fields.Nested(limits),
            "model_id": fields.String,
            "image_transports": fields.List(fields.String),
            "leaving": fields.Boolean(
                default=False,
                description="The worker stops: it gets no job and is offline at once.",
            ),
        },
    )


def build_pop_response(namespace: Namespace) -> Any:
    """A job, or nothing."""
    return namespace.model(
        "GenerationPayloadKobold",
        {
            "payload": fields.Raw,
            "id": fields.String,
            "ids": fields.List(fields.String),
            "messages": fields.List(fields.Raw),
            "ttl": fields.Integer(description="Seconds until the job is given to another worker."),
            "extra_source_images": fields.Raw,
            "skipped": fields.Raw(description="Why waiting requests were not for this worker."),
            "softprompt": fields.String,
            "model": fields.String,
            "chat": fields.Boolean(description="True on a chat job, absent otherwise."),
        },
    )


def build_submit_input(namespace: Namespace) -> Any:
    """A worker's reply: `generation` for a text job, the other keys for a chat job."""
    return namespace.model(
        "SubmitInputKobold",
        {
            "id": fields.String(required=True),
            "generation": fields.String,
            "state": fields.String(enum=["ok", "censored", "faulted", "csam"], default="ok"),
            "seed": fields.Integer,
            "gen_metadata": fields.List(fields.Raw),
            "message": fields.Raw,
            "finish_reason": fields.String(enum=["stop", "length", "content_filter", "tool_calls"]),
            "native_finish_reason": fields.String(max_length=32),
            "prompt_tokens": fields.Integer(min=0),
            "completion_tokens": fields.Integer(min=0),
            "reasoning_tokens": fields.Integer(min=0),
            "model_id": fields.String,
            "fault_reason": fields.String,
        },
    )


def build_progress_input(namespace: Namespace) -> Any:
    """A post of a streamed job's worker."""
    delta = namespace.model(
        "ProgressDelta",
        {
            "content": fields.String(
                description="The text since the previous post; empty only beside reasoning."
            ),
            "reasoning_content": fields.String(
                description="The reasoning since the previous post."
            ),
        },
    )
    return namespace.model(
        "ProgressInputKobold",
        {
            "id": fields.String(required=True, description="The job."),
            "seq": fields.Integer(
                min=1,
                required=True,
                description="1 for the first post of a job, then one more for each.",
            ),
            "delta": fields.Nested(delta, required=True),
        },
    )


def build_progress_accepted(namespace: Namespace) -> Any:
    """What an accepted post is told."""
    return namespace.model(
        "ProgressAccepted",
        {
            "accepted_seq": fields.Integer,
            "cancelled": fields.Boolean(
                description="Whether the request was cancelled: stop generating."
            ),
        },
    )


def build_submitted(namespace: Namespace) -> Any:
    """What a reply earned."""
    return namespace.model("GenerationSubmitted", {"reward": fields.Float})
