# SPDX-License-Identifier: AGPL-3.0-or-later
"""A job of either kind: from what the horde popped to the body to submit."""

from horde.bridge.chat_jobs import serve_chat_job
from horde.bridge.job import Connections, Job
from horde.bridge.plan import ServingPlan
from horde.bridge.text_jobs import serve_text_job
from horde.json_text import JsonObject


def serve_job(job: Job, connections: Connections, plan: ServingPlan) -> JsonObject:
    """Serve a job; the submit's body.

    Raises ``JobFault`` for a job this worker gives back, ``BackendUnavailable`` when the backend
    is gone, or ``JobAbandoned`` for a streamed job that needs no submit any more.
    """
    if job.is_chat:
        return serve_chat_job(job, connections, plan)
    return serve_text_job(job, connections.backend, plan)
