# SPDX-License-Identifier: AGPL-3.0-or-later
"""The instruments: name, unit and attributes of each stand here and nowhere else.

Instruments made here are idle until `telemetry` sets a provider. An attribute's value is an enum, a
bucket, a boolean or a name this project chose: never an id, and never text that a user or worker
sent. Source: docs/reference/metrics.md, which a test holds to this file.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation, get_meter

TEXT_LENGTH_BUCKETS = ((512, "<=512"), (1024, "513-1024"), (2048, "1025-2048"), (4096, "2049-4096"))
LONGEST_TEXT_LENGTH_BUCKET = ">4096"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What the reference says about an instrument."""

    kind: str
    unit: str
    attributes: tuple[str, ...]


DECLARATIONS: dict[str, Declaration] = {}

_meter = get_meter("horde")
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAIT_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0)
_gauge_sources: dict[str, Callable[[], Iterable[Observation]]] = {}


def get_text_length_bucket(max_length: int) -> str:
    """The label of an output length in tokens."""
    return next(
        (label for bound, label in TEXT_LENGTH_BUCKETS if max_length <= bound),
        LONGEST_TEXT_LENGTH_BUCKET,
    )


def set_gauge_source(name: str, read: Callable[[], Iterable[Observation]]) -> None:
    """Let `read` answer for a declared gauge whenever figures are collected; replaces what answered
    before.
    """
    if DECLARATIONS[name].kind != "gauge":
        raise ValueError(f"{name} is no gauge")
    _gauge_sources[name] = read


def _counter(name: str, description: str, *attributes: str) -> Counter:
    DECLARATIONS[name] = Declaration("counter", "1", attributes)
    return _meter.create_counter(name, "1", description)


def _histogram(
    name: str, description: str, bounds: tuple[float, ...], *attributes: str
) -> Histogram:
    DECLARATIONS[name] = Declaration("histogram", "s", attributes)
    return _meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=bounds
    )


def _gauge(name: str, unit: str, description: str, *attributes: str) -> None:
    """A figure that is read when it is collected: the part that knows it calls
    `set_gauge_source`.
    """
    DECLARATIONS[name] = Declaration("gauge", unit, attributes)

    def read(_options: CallbackOptions) -> Iterable[Observation]:
        source = _gauge_sources.get(name)
        return source() if source else ()

    _meter.create_observable_gauge(name, [read], unit, description)


# The API

http_requests = _counter(
    "horde.http.requests",
    "Answered requests. The route is its template, or `unknown` for a path that no route has.",
    "horde.method",
    "horde.route",
    "horde.status",
)
http_request_seconds = _histogram(
    "horde.http.request_seconds",
    "Time to answer a request.",
    _REQUEST_SECONDS,
    "horde.method",
    "horde.route",
)

# The parts behind it

redis_failures = _counter(
    "horde.redis.failures",
    "Redis calls that failed or were skipped.",
    "horde.purpose",
    "horde.outcome",
)
after_commit_failures = _counter(
    "horde.db.after_commit_failures", "Calls after a commit that raised; the commit stands."
)
signal_failures = _counter(
    "horde.chat.signal_failures", "Completion signals that could not be published."
)
store_failures = _counter(
    "horde.store.failures",
    "Calls to the object store that failed or were skipped, and keys it did not delete.",
    "horde.operation",
    "horde.outcome",
)
store_seconds = _histogram(
    "horde.store.seconds",
    "Time of one call to the object store.",
    _REQUEST_SECONDS,
    "horde.operation",
)
store_deletes = _counter(
    "horde.store.deletes", "Objects of ended requests by what became of them.", "horde.outcome"
)
_gauge("horde.store.waiting_deletes", "1", "Objects whose deletion failed and is tried again.")
webhook_deliveries = _counter(
    "horde.webhook.deliveries", "Webhooks by what became of them.", "horde.outcome"
)
_gauge("horde.db.pool_connections", "1", "Database connections of a process.", "horde.state")
_gauge(
    "horde.kudos.fold_lag_seconds",
    "s",
    "Age of the oldest kudos posting that is not folded into a balance yet.",
)

job_seconds = _histogram(
    "horde.background.job_seconds", "Time of one run of a periodic job.", _WAIT_SECONDS, "horde.job"
)
job_failures = _counter(
    "horde.background.job_failures", "Runs of a periodic job that raised.", "horde.job"
)
_gauge("horde.background.leader", "1", "1 in the process that runs the leader's jobs, else 0.")

# Text and chat

image_fetch_seconds = _histogram(
    "horde.image.fetch_seconds",
    "Time to fetch an image of a chat request.",
    _REQUEST_SECONDS,
    "horde.outcome",
)
image_encode_seconds = _histogram(
    "horde.image.encode_seconds",
    "Time to decode and encode an image of a chat request, the wait for a turn included.",
    _REQUEST_SECONDS,
    "horde.outcome",
)
chat_max_length_lowered = _counter(
    "horde.chat.max_length_lowered",
    "Chat requests whose output length was lowered to the largest one declared by the workers of"
    " their models.",
    "horde.requested_bucket",
    "horde.declared_bucket",
    "horde.dry_run",
)
chat_worker_faults = _counter(
    "horde.chat.worker_faults",
    "Faulted chat submits by the reason the worker sent.",
    "horde.reason",
    "horde.worker_trusted",
)
text_context_fit = _counter(
    "horde.text.context_fit",
    "Requests whose messages were trimmed to the context.",
    "horde.outcome",
    "horde.mode",
)
text_lease_renewals = _counter(
    "horde.text.lease_renewals",
    "Progress posts that extended their job's lease, or found it at its cap.",
    "horde.outcome",
    "horde.worker_trusted",
)
text_lease_renewal_failures = _counter(
    "horde.text.lease_renewal_failures",
    "Extended leases that could not be written to the job's row; the post was accepted.",
)
text_stale_aborts = _counter(
    "horde.text.stale_aborts",
    "Jobs aborted because their lease lapsed.",
    "horde.worker_trusted",
    "horde.chat",
)
text_empty_generations = _counter(
    "horde.text.empty_generations",
    "Completed generations without text or tool calls. The model is a name of the model reference,"
    " or `other`.",
    "horde.model",
)
text_queue_wait_seconds = _histogram(
    "horde.text.queue_wait_seconds",
    "Time from the creation of a request to the pop of a job of it.",
    _WAIT_SECONDS,
    "horde.requester",
    "horde.chat",
    "horde.requested_bucket",
)
free_allowance_decisions = _counter(
    "horde.text.free_allowance.decisions",
    "Request creations by how they were paid.",
    "horde.requester",
    "horde.outcome",
    "horde.requested_bucket",
    "horde.allowance_bucket",
    "horde.chat",
)
free_allowance_estimated_wait_seconds = _histogram(
    "horde.text.free_allowance.estimated_wait_seconds",
    "The wait by which the free allowance was sized.",
    _WAIT_SECONDS,
    "horde.chat",
    "horde.requester",
)
pop_lease_capacity_limited = _counter(
    "horde.pop.lease_capacity_limited",
    "Pops by a chat worker whose measured speed caps its output below what it declares.",
    "horde.gentype",
)
gate_shadow_assignments = _counter(
    "horde.text.gate_shadow.assignments",
    "Text jobs assigned over the worker's capacity.",
    "horde.worker_trusted",
    "horde.size_bucket",
)
gate_shadow_outcomes = _counter(
    "horde.text.gate_shadow.outcomes",
    "How those jobs ended.",
    "horde.worker_trusted",
    "horde.size_bucket",
    "horde.outcome",
)
gate_shadow_service_seconds = _histogram(
    "horde.text.gate_shadow.service_seconds",
    "Time from pop to submit of those that were completed.",
    _WAIT_SECONDS,
    "horde.worker_trusted",
    "horde.size_bucket",
)

# The OpenAI-compatible front

oai_completions = _counter(
    "horde.oai.completions",
    "Delivered completions, streamed or not; no dry runs.",
    "finish_reason",
    "lowered",
    "form",
)
oai_errors = _counter(
    "horde.oai.errors",
    "Errors sent, by their code, where the call stood and the form it came in.",
    "code",
    "phase",
    "form",
)
oai_wait_seconds = _histogram(
    "horde.oai.wait_seconds",
    "Time from accepting a call to its reply.",
    _WAIT_SECONDS,
    "stream",
    "form",
)
oai_first_delta_seconds = _histogram(
    "horde.oai.first_delta_seconds",
    "Time from accepting a call to its first delta of content or reasoning.",
    _WAIT_SECONDS,
    "form",
)
oai_streams = _counter("horde.oai.streams", "Ended streams.", "outcome", "form")
oai_submit_retries = _counter(
    "horde.oai.submit_retries", "Ambiguous submits by what their repetition brought.", "outcome"
)
oai_pops = _counter(
    "horde.oai.pops",
    "Pops that the front passed on, by why it asked and what the API answered.",
    "reason",
    "outcome",
)
oai_hand_backs = _counter(
    "horde.oai.hand_backs", "Jobs given back because their worker had gone.", "outcome"
)
_gauge("horde.oai.waiting_workers", "1", "Workers that wait for a job at this front.")
oai_stored_responses = _counter(
    "horde.oai.stored_responses",
    "Responses written to their store, read, missed or deleted, and calls it did not answer.",
    "outcome",
)
oai_resumed_streams = _counter(
    "horde.oai.resumed_streams", "Streams of stored responses that were taken up again."
)
_gauge("horde.oai.open_requests", "1", "Calls open now.", "stream", "form")
