# SPDX-License-Identifier: AGPL-3.0-or-later
"""A popped job, whom it may talk to, and how it is given back."""

from dataclasses import dataclass

from horde_sdk.worker.chat_declaration import ChatFaultReason, build_chat_fault_submit

from horde.bridge.backend import Backend
from horde.bridge.inputs import InputFetcher
from horde.bridge.lease import DEFAULT_LEASE_SECONDS, Lease
from horde.bridge.plan import ServingPlan
from horde.bridge.progress import PostProgress
from horde.bridge.refusals import BackendRefusal
from horde.json_text import JsonObject


class JobFault(Exception):
    """This worker cannot serve the job.

    ``detail`` is for the worker's log and holds nothing of the request. ``reason`` is None where
    the horde has no word for it. ``is_backend_trouble`` says that the next job may fare the same,
    ``is_key_refused`` that all will.
    """

    def __init__(
        self,
        reason: ChatFaultReason | None,
        detail: str,
        *,
        is_backend_trouble: bool = False,
        is_key_refused: bool = False,
    ) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail
        self.is_backend_trouble, self.is_key_refused = is_backend_trouble, is_key_refused


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
        """The submit that gives the job back.

        A text job's form is the one text workers send, which carries no reason.
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
    ttl = answer.get("ttl")
    lease_seconds = DEFAULT_LEASE_SECONDS
    if isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl > 0:
        lease_seconds = float(ttl)
    return Job(
        job_id=str(answer["id"]),
        is_chat=answer.get("chat") is True,
        model=str(answer.get("model") or plan.model),
        body=answer,
        lease=Lease(lease_seconds),
    )


def build_refusal_fault(
    refusal: BackendRefusal, texts: list[str], *, is_constrained: bool = False
) -> JobFault:
    """Why the backend would not: too long, a format it cannot build, or anything else.

    ``texts`` are those of the request, which the log must not repeat.
    """
    detail = refusal.describe(texts)
    if refusal.is_context_overflow:
        return JobFault(ChatFaultReason.PROMPT_OVERFLOW, detail)
    if is_constrained and refusal.is_grammar_refusal:
        return JobFault(ChatFaultReason.UNBUILDABLE_GRAMMAR, detail)
    # 400 and 422 are about this request. Anything else (no such model, not allowed, overloaded,
    # crashed) is about the backend.
    return JobFault(
        ChatFaultReason.GENERATION_ERROR,
        detail,
        is_backend_trouble=refusal.status not in (400, 422),
        is_key_refused=refusal.status == 401,
    )
