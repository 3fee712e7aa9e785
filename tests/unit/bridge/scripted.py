# SPDX-License-Identifier: AGPL-3.0-or-later
"""A horde and a backend that say what a test scripted, behind httpx's mock transport."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from horde.bridge.backend import Backend
from horde.bridge.config import BridgeConfig
from horde.bridge.horde_api import HordeApi
from horde.bridge.inputs import InputFetcher
from horde.bridge.job import Connections, Job, parse_job
from horde.bridge.plan import ServingPlan
from horde.bridge.probe import build_serving_plan
from horde.bridge.progress import PostProgress

API_URL, BACKEND_URL, KEY, MODEL = (
    "http://horde.test/api",
    "http://backend.test/v1",
    "owner-key",
    "tiny",
)

Answer = httpx.Response | Exception | Callable[[dict[str, Any]], httpx.Response]

LLAMA_MODELS = {"data": [{"id": MODEL, "owned_by": "llamacpp"}]}
LLAMA_PROPS = {
    "default_generation_settings": {"n_ctx": 2048},
    "total_slots": 2,
    "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "$defs": {"city": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def answer(body: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body)


class Script:
    """Answers by path. A list is used up, its last entry stays; each request's body is kept under
    its path.
    """

    def __init__(self, answers: dict[str, Answer | list[Answer]]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[httpx.Headers] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        self.requests.append((path, body))
        self.headers.append(request.headers)
        scripted = self.answers.get(path)
        if scripted is None:
            return answer({"error": {"message": "no such route"}}, 404)
        if isinstance(scripted, list):
            scripted = scripted.pop(0) if len(scripted) > 1 else scripted[0]
        if isinstance(scripted, Exception):
            raise scripted
        if callable(scripted):
            return scripted(body)
        return httpx.Response(
            scripted.status_code,
            headers=scripted.headers,
            stream=httpx.ByteStream(scripted.content),
        )

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.requests if asked == path]


def completion(
    content: str | None = "Blue.", finish_reason: str = "stop", **message: object
) -> httpx.Response:
    return answer(
        {
            "choices": [
                {
                    "finish_reason": finish_reason,
                    "message": {"role": "assistant", "content": content, **message},
                }
            ],
            "usage": {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24},
        }
    )


def llama_script(**answers: Answer | list[Answer]) -> Script:
    """A llama.cpp with tools, 2048 tokens of context and 10-token prompts; ``chat=`` and the like
    replace its answers.
    """
    paths = {
        "chat": "/v1/chat/completions",
        "complete": "/v1/completions",
        "tokenize": "/tokenize",
        "models": "/v1/models",
    }
    script: dict[str, Answer | list[Answer]] = {
        "/v1/models": answer(LLAMA_MODELS),
        "/props": answer(LLAMA_PROPS),
        "/apply-template": answer({"prompt": "<|im_start|>assistant\n"}),
        "/tokenize": answer({"tokens": list(range(10))}),
        "/v1/chat/completions": completion(),
        "/v1/completions": answer({"choices": [{"text": " and then", "finish_reason": "length"}]}),
    }
    return Script(script | {paths[name]: scripted for name, scripted in answers.items()})


def build_config(**changes: Any) -> BridgeConfig:
    facts: dict[str, Any] = {
        "api_url": API_URL,
        "api_key": KEY,
        "backend_url": BACKEND_URL,
        "worker_name": "w",
        "max_length": 512,
    }
    return BridgeConfig(**facts | changes)


def build_backend(script: Script) -> Backend:
    return Backend(BACKEND_URL, None, transport=script.transport)


def build_horde(script: Script) -> HordeApi:
    return HordeApi(API_URL, KEY, "agent:1:url", transport=script.transport)


def build_inputs(script: Script | None = None) -> InputFetcher:
    return InputFetcher((script or Script({})).transport)


def build_connections(
    script: Script, inputs: Script | None = None, post_progress: PostProgress | None = None
) -> Connections:
    """To a scripted backend; nothing may be posted unless ``post_progress`` takes it."""
    return Connections(
        backend=build_backend(script),
        inputs=build_inputs(inputs),
        post_progress=post_progress or (lambda _: pytest.fail("nothing is posted")),
    )


def build_plan(script: Script | None = None, **changes: Any) -> ServingPlan:
    return build_serving_plan(build_backend(script or llama_script()), build_config(**changes))


def chat_answer(**payload: Any) -> dict[str, Any]:
    """What the horde answers a pop with when it has a chat job."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    neutral |= {
        "rep_pen": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "n": 1,
        "max_length": 64,
        "max_context_length": 1024,
    }
    messages = [{"role": "user", "content": "Name one colour."}]
    body = {
        "id": "job-1",
        "ids": ["job-1"],
        "model": MODEL,
        "ttl": 150,
        "messages": [],
        "skipped": {},
        "chat": True,
    }
    return body | {"payload": {"messages": messages, **neutral, **payload}}


def text_answer(**payload: Any) -> dict[str, Any]:
    """What the horde answers a pop with when it has a text job."""
    body = {
        "id": "job-2",
        "ids": ["job-2"],
        "model": MODEL,
        "ttl": 150,
        "messages": [],
        "skipped": {},
    }
    return body | {
        "payload": {
            "prompt": "Once",
            "max_length": 32,
            "max_context_length": 1024,
            "n": 1,
            **payload,
        }
    }


NO_JOB = {
    "id": None,
    "ids": [],
    "payload": {},
    "skipped": {},
    "model": None,
    "messages": [],
    "ttl": None,
}


def build_job(body: dict[str, Any], plan: ServingPlan) -> Job:
    return parse_job(body, plan)
