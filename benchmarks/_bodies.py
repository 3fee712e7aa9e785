# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the clients and workers of a benchmark send."""

from typing import Any

MODEL = "elinas/chronos-70b-v2"  # one of the reference, as most are
OTHER_MODEL = "mistralai/Mistral-7B-Instruct-v0.3"
PROMPT = (
    "Once upon a time, in a land far away, there lived a language model that answered everybody in"
    " turn. "
)
# Short enough that nobody judges how fast it came (see speed_limits.py).
REPLY = "It answered the first, and the second, and in the end the one who had waited longest. " * 2

# tokens; in the same power of two as TOO_LONG, which a worker of this length cannot take.
REQUEST_LENGTH = 300
WORKER_LENGTH = 400
CLOSELY_TOO_LONG = 500
FAR_TOO_LONG = 1000


def build_text_request(
    tag: str, *, model: str = MODEL, max_length: int = REQUEST_LENGTH, **more: Any
) -> dict[str, Any]:
    """A text request whose prompt begins with a tag, by which the worker that gets it knows whose
    it is.
    """
    params = {"max_length": max_length, "max_context_length": 2048, "temperature": 0.7}
    return {"prompt": f"{tag} {PROMPT * 4}", "params": params, "models": [model], **more}


def build_chat_request(
    tag: str, *, model: str = MODEL, max_tokens: int = REQUEST_LENGTH, **more: Any
) -> dict[str, Any]:
    """The same as a chat request."""
    messages = [
        {"role": "system", "content": f"{tag} You are a helpful assistant."},
        {"role": "user", "content": PROMPT * 4},
    ]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.7,
        **more,
    }


def build_pop(name: str, *, is_chat: bool, model: str = MODEL) -> dict[str, Any]:
    """The pop of a worker; one for chat declares no more than chat needs."""
    pop: dict[str, Any] = {
        "name": name,
        "models": [model],
        "bridge_agent": "KoboldCppEmbedWorker:2:benchmark",
        "max_length": WORKER_LENGTH,
        "max_context_length": 4096,
        "threads": 1,
    }
    if is_chat:
        limits = {"max_context_length": 4096, "max_length": WORKER_LENGTH}
        pop |= {
            "chat_jobs": True,
            "chat_features": ["prompt_overflow_refused"],
            "chat_limits": limits,
            "model_id": model,
        }
    return pop


def build_submit(job: dict[str, Any]) -> dict[str, Any]:
    """The reply to a popped job."""
    if not job.get("chat"):
        return {"id": job["id"], "generation": REPLY, "state": "ok", "seed": 1}
    message = {"role": "assistant", "content": REPLY}
    usage = {"prompt_tokens": 120, "completion_tokens": 40}
    return {
        "id": job["id"],
        "message": message,
        "finish_reason": "stop",
        "model_id": job["model"],
        **usage,
    }


def read_tag(job: dict[str, Any]) -> str:
    """The tag of the request that a popped job belongs to."""
    payload = job["payload"]
    text = payload["messages"][0]["content"] if job.get("chat") else payload["prompt"]
    return str(text).partition(" ")[0]
