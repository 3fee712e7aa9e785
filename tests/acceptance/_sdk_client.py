# SPDX-License-Identifier: AGPL-3.0-or-later
"""The published client library against a horde: run as a process with AI_HORDE_URL set, which it
reads when imported.

``request KEY MODEL``: a dry run, then a generation, waited for (the library never sees the end of
several). ``worker KEY MODEL NAME``: one job popped and answered. Each prints JSON.
"""

import json
import sys

from loguru import logger

logger.remove()  # it prints requests

from horde_sdk.ai_horde_api.ai_horde_clients import (  # noqa: E402
    AIHordeAPIManualClient,
    AIHordeAPISimpleClient,
)
from horde_sdk.ai_horde_api.apimodels.base import JobSubmitResponse  # noqa: E402
from horde_sdk.ai_horde_api.apimodels.generate.text.async_ import (  # noqa: E402
    ModelGenerationInputKobold,
    TextGenerateAsyncRequest,
)
from horde_sdk.ai_horde_api.apimodels.generate.text.pop import (  # noqa: E402
    TextGenerateJobPopRequest,
    TextGenerateJobPopResponse,
)
from horde_sdk.ai_horde_api.apimodels.generate.text.submit import (  # noqa: E402
    TextGenerationJobSubmitRequest,
)
from horde_sdk.ai_horde_api.consts import GENERATION_STATE  # noqa: E402


def request(key: str, model: str) -> dict[str, object]:
    """What the library read of a dry run and of a finished request."""
    client = AIHordeAPISimpleClient()
    params = ModelGenerationInputKobold(
        n=1, max_length=24, max_context_length=1024, temperature=0.8, stop_sequence=["\n\n"]
    )
    wanted = {
        "apikey": key,
        "prompt": "Once upon a time",
        "models": [model],
        "params": params,
        "trusted_workers": True,
    }
    quote = client.text_generate_request_dry_run(TextGenerateAsyncRequest(**wanted, dry_run=True))
    seen = []
    status, request_id = client.text_generate_request(
        TextGenerateAsyncRequest(**wanted), check_callback=seen.append
    )
    return {
        "quote": quote.kudos,
        "resolved_length": quote.resolved
        and quote.resolved.params
        and quote.resolved.params.max_length,
        "id": str(request_id),
        "checks": len(seen),
        "done": status.done,
        "kudos": status.kudos,
        "texts": [generation.text for generation in status.generations],
        "models": [generation.model for generation in status.generations],
        "states": [generation.state for generation in status.generations],
        "unknown": sorted((status.model_extra or {}).keys()),
    }


def serve(key: str, model: str, name: str) -> dict[str, object]:
    """What the library read as a worker."""
    client = AIHordeAPIManualClient()
    pop = TextGenerateJobPopRequest(
        apikey=key, name=name, models=[model], max_length=512, max_context_length=2048
    )
    job = client.submit_request(pop, TextGenerateJobPopResponse)
    if not isinstance(job, TextGenerateJobPopResponse) or not job.ids:
        return {"job": None, "answer": str(job)}
    reply = TextGenerationJobSubmitRequest(
        apikey=key, id=job.ids[0], generation="there was a horde.", state=GENERATION_STATE.ok
    )
    stored = client.submit_request(reply, JobSubmitResponse)
    reward = stored.reward if isinstance(stored, JobSubmitResponse) else str(stored)
    return {
        "job": str(job.ids[0]),
        "prompt": job.payload.prompt,
        "length": job.payload.max_length,
        "ttl": job.ttl,
        "reward": reward,
    }


if __name__ == "__main__":
    act = {"request": request, "worker": serve}[sys.argv[1]]
    print(json.dumps(act(*sys.argv[2:])))
