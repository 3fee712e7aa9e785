# SPDX-License-Identifier: AGPL-3.0-or-later
"""The servers that people run, as a scripted backend speaks like each of them.

A row holds what a server answers about itself, how it streams a text and a call, and how it refuses
a prompt that is too long and a key it does not know, as documented by it or seen of it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.unit.bridge.scripted import LLAMA_MODELS, LLAMA_PROPS, Answer, Script, answer

CHAT = "/v1/chat/completions"


def sse(*chunks: Any, before: str = "", newline: str = "\n") -> str:
    """Events as most servers send them; a string is sent as it is."""
    events = (
        chunk if isinstance(chunk, str) else f"{before}data: {json.dumps(chunk)}\n\n"
        for chunk in chunks
    )
    return "".join(events).replace("\n", newline)


def piece(finish_reason: Any = None, index: Any = 0, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]}


def call(arguments: Any, name: str | None = "now", **more: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"index": 0, "id": "a", "type": "function", "function": function} | more


def error(message: str, status: int = 400, **more: Any) -> httpx.Response:
    return answer({"error": {"message": message, "type": "invalid_request_error"} | more}, status)


DONE = "data: [DONE]\n\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 3}}
TEXT = sse(piece(role="assistant", content=""), piece(content="Bl"), piece(content="ue."))
CALL = sse(piece(tool_calls=[call("")]), piece(tool_calls=[call("{}", None, id=None)]))
EXTRA_FORBIDDEN = answer(
    {
        "object": "error",
        "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'top_k'), 'msg': 'Extra inputs are"
        " not permitted', 'input': 40}]",
        "type": "BadRequestError",
        "code": 400,
    },
    400,
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """One row. ``declares`` is without options but a context length."""

    name: str
    entry: dict[str, Any]
    routes: dict[str, Answer] = field(default_factory=dict)
    kind: str = "other"
    context: int | None = None
    declares: frozenset[str] = frozenset()
    text: str = TEXT + sse(piece("stop"), USAGE, DONE)
    calls: str = CALL + sse(piece("tool_calls"), USAGE, DONE)
    overflow: httpx.Response = field(default_factory=lambda: error("prompt is too long"))
    unknown_key: httpx.Response = field(
        default_factory=lambda: error("Unrecognized request argument supplied: top_k")
    )

    def build_script(self, chat: Answer | list[Answer]) -> Script:
        models = answer({"object": "list", "data": [{"id": "m", "object": "model"} | self.entry]})
        return Script({"/v1/models": models, CHAT: chat} | self.routes)


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, content=text.encode(), headers={"Content-Type": "text/event-stream"})


SAMPLING = frozenset({"presence_penalty", "frequency_penalty"})
FORMATS = frozenset({"json_object", "json_schema", "structured_output_enforced"})
TOOLS = frozenset({"tools", "single_tool_call_enforced"})
REFUSES = frozenset({"prompt_overflow_refused"})
SEED = frozenset({"seed"})

SERVERS = [
    Server(
        name="llama.cpp",
        entry=LLAMA_MODELS["data"][0],
        routes={
            "/props": answer(LLAMA_PROPS),
            "/apply-template": answer({"prompt": "x"}),
            "/tokenize": answer({"tokens": [1] * 9}),
        },
        kind="llama.cpp",
        context=2048,
        declares=SEED | SAMPLING | FORMATS | TOOLS | REFUSES
        | {"tool_choice_enforced", "tools_with_response_format"},
        text=sse(piece(role="assistant", content=None), piece(content="Bl"))
        + sse(piece(content="ue."), piece("stop"), {**USAGE, "timings": {"n": 1}}, DONE),
        overflow=answer(
            {
                "error": {
                    "code": 400,
                    "message": "the request exceeds the available context size, try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 9000,
                    "n_ctx": 2048,
                }
            },
            400,
        ),
    ),
    Server(
        name="vLLM",
        entry={"owned_by": "vllm", "max_model_len": 8192},
        kind="vllm",
        context=8192,
        declares=SEED | SAMPLING | FORMATS | REFUSES,
        # Each piece of a call has an id of its own in older versions.
        calls=sse(
            piece(role="assistant", content=""),
            piece(tool_calls=[call(None, id="x1")]),
            piece(tool_calls=[call("{", None, id="x2")]),
            piece(tool_calls=[call("}", None, id="x3")]),
            piece("tool_calls"),
            DONE,
        ),
        overflow=answer(
            {
                "object": "error",
                "message": "'max_tokens' or 'max_completion_tokens' is too large: 64. This model's"
                " maximum context length is 8192 tokens and your request has 8190 input tokens"
                " (64 > 8192 - 8190).",
                "type": "BadRequestError",
                "code": 400,
            },
            400,
        ),
        unknown_key=EXTRA_FORBIDDEN,
    ),
    Server(
        name="SGLang",
        entry={"owned_by": "sglang", "max_model_len": 32768},
        kind="sglang",
        context=32768,
        declares=SAMPLING | FORMATS | REFUSES,
        text=TEXT + sse({"choices": [{"delta": {}, "finish_reason": "stop", "matched_stop": 2}]})
        + sse(USAGE, DONE),
        overflow=answer(
            {
                "object": "error",
                "message": "The input (40000 tokens) is longer than the model's context length"
                " (32768 tokens).",
                "code": 400,
            },
            400,
        ),
    ),
    Server(
        name="TGI",
        entry={"owned_by": "m"},
        routes={"/info": answer({"model_id": "m", "max_total_tokens": 4096, "version": "3.0"})},
        kind="tgi",
        context=4096,
        declares=SEED | REFUSES | {"frequency_penalty"},
        text=TEXT + sse(piece("eos_token"), DONE).replace("data: ", "data:"),
        # One call as an object, not in an array.
        calls=sse(piece(tool_calls=call("{", id="")), piece(tool_calls=call("}", "", id="")))
        + sse(piece("tool_calls"), DONE),
        overflow=answer(
            {
                "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <="
                " 4096. Given: 5000 `inputs` tokens and 64 `max_new_tokens`",
                "error_type": "validation",
            },
            422,
        ),
        unknown_key=httpx.Response(
            422, text="Failed to deserialize the JSON body: unknown field `top_k`"
        ),
    ),
    Server(
        name="Ollama",
        entry={"owned_by": "library"},
        routes={
            "/api/show": answer(
                {
                    "capabilities": ["completion", "tools", "vision"],
                    "parameters": 'stop                           "<|im_end|>"\nnum_ctx   8192',
                    "model_info": {"llama.context_length": 131072},
                }
            ),
            "/api/ps": answer({"models": []}),
        },
        kind="ollama",
        context=8192,
        declares=SEED | SAMPLING | FORMATS | TOOLS | {"vision"},
        # Both calls under one index, each whole.
        calls=sse(piece(role="assistant", content="", tool_calls=[call("{}", id="call_1")]))
        + sse(piece("tool_calls", role="assistant", content=""), DONE),
    ),
    Server(
        name="koboldcpp",
        entry={"owned_by": "koboldcpp"},
        routes={
            "/api/extra/true_max_context_length": answer({"value": 4096}),
            "/api/extra/tokencount": answer({"value": 7, "ids": [1] * 7}),
        },
        kind="koboldcpp",
        context=4096,
        declares=SEED | REFUSES,
        text=sse(piece(role="assistant", content="Bl"), piece(content="ue."),
            before="event: message\n")
        + sse(piece("stop", content=""), DONE),
        calls=sse(piece("tool_calls", tool_calls=[call("{}", id="call_001")]), DONE),
        overflow=answer({"detail": {"msg": "Prompt is over the context limit", "type": "x"}}, 500),
    ),
    Server(
        name="TabbyAPI",
        entry={"owned_by": "tabbyAPI"},
        routes={
            "/v1/model": answer({"id": "m", "parameters": {"max_seq_len": 4096}}),
            "/v1/token/encode": answer({"tokens": [1, 2], "length": 2}),
        },
        kind="tabbyapi",
        context=4096,
        declares=SAMPLING | REFUSES,
        text=sse(piece(role="assistant", content="Blue."), newline="\r\n")
        + sse({"choices": [{"index": 0, "finish_reason": "stop"}]}, DONE, newline="\r\n"),
        overflow=answer(
            {
                "detail": {
                    "error": {
                        "message": "Prompt length 5000 is greater than max_seq_len 4096",
                        "trace": None,
                    }
                }
            },
            422,
        ),
    ),
    Server(
        name="LM Studio",
        entry={"owned_by": "organization_owner"},
        routes={"/api/v0/models/m": answer({"id": "m", "loaded_context_length": 4096})},
        kind="lm studio",
        context=4096,
        declares=SEED | SAMPLING | FORMATS - {"json_object"},
        overflow=stream(
            'event: error\ndata: {"error":{"message":"The number of tokens to keep from the initial'
            ' prompt is greater than the context length"}}\n\n'
        ),
    ),
    Server(
        name="TensorRT-LLM",
        entry={"owned_by": "tensorrt_llm"},
        kind="tensorrt-llm",
        declares=SEED | SAMPLING,
        overflow=answer(
            {
                "object": "error",
                "message": "The sum of prompt length (5000.0) and query length (0) should not"
                " exceed max_num_tokens (4096)",
                "type": "BadRequestError",
                "code": 400,
            },
            400,
        ),
        unknown_key=EXTRA_FORBIDDEN,
    ),
    Server(
        name="MLX",
        entry={},
        text=": keepalive 0/21\n\n" + TEXT + ": keepalive\n\n" + sse(piece("stop"), USAGE, DONE),
        calls=sse(piece("tool_calls",
            tool_calls=[{"function": {"name": "now", "arguments": "{}"}}]))
        + DONE,
        overflow=answer({"error": "Prompt too long for the model's context"}, 404),
        unknown_key=answer({"error": "top_k must be a non-negative integer"}, 400),
    ),
    Server(
        name="OpenRouter",
        entry={"context_length": 131072},
        context=131072,
        text=": OPENROUTER PROCESSING\n\n"
        + sse(
            piece(
                reasoning="Hm.",
                reasoning_details=[{"type": "reasoning.text", "text": "Hm."}],
                content="",
            )
        )
        + TEXT + sse(piece("stop"), USAGE, DONE),
        overflow=stream(
            sse(
                {
                    "error": {
                        "code": 400,
                        "message": "This endpoint's maximum context length is 131072 tokens."
                        " However, you requested about 140000 tokens.",
                    },
                    "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
                }
            )
        ),
    ),
    Server(
        name="Mistral",
        entry={"owned_by": "mistralai", "max_context_length": 32768},
        context=32768,
        text=sse(
            piece(role="assistant", content=[]),
            piece(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]),
            piece(content=[{"type": "text", "text": "Blue"}]),
            piece("stop", content="."),
            DONE,
        ),
        overflow=answer(
            {
                "object": "error",
                "message": "Prompt contains 40000 tokens, too large for model with 32768 maximum"
                " context length",
                "type": "invalid_request_message_order",
                "code": "3051",
            },
            400,
        ),
        unknown_key=answer(
            {"detail": [{"type": "extra_forbidden", "loc": ["body", "top_k"], "input": 40}]}, 422
        ),
    ),
    Server(
        name="Gemini",
        entry={"owned_by": "google"},
        calls=sse(
            piece(tool_calls=[call({}, id="", index=0)]), piece("stop", role="assistant"), DONE
        ),
        overflow=answer(
            [
                {
                    "error": {
                        "code": 400,
                        "message": "The input token count (2000000) exceeds the maximum number of"
                        " tokens allowed (1048576).",
                        "status": "INVALID_ARGUMENT",
                    }
                }
            ],
            400,
        ),
        unknown_key=answer(
            [{"error": {"code": 400, "message": 'Invalid JSON payload: Unknown name "top_k"'}}], 400
        ),
    ),
    Server(
        name="Groq",
        entry={"owned_by": "Meta", "context_window": 8192},
        context=8192,
        text=TEXT + sse({**piece("stop"), "x_groq": {"usage": USAGE["usage"]}}, DONE),
        overflow=error(
            "Please reduce the length of the messages or completion.",
            code="context_length_exceeded"
        ),
        unknown_key=error("property 'top_k' is unsupported"),
    ),
    Server(
        name="OpenAI",
        entry={"owned_by": "system"},
        unknown_key=error(
            "Unknown parameter: 'top_k'.", param="top_k", code="unknown_parameter"
        ),
        overflow=error(
            "Input tokens exceed the configured limit of 272000 tokens.",
            code="context_length_exceeded",
        ),
    ),
    Server(
        name="Anthropic's compatible route",
        entry={"owned_by": "anthropic"},
        text=sse(piece(role="assistant", content="Blue."), piece("stop"), DONE),
        overflow=error("prompt is too long: 208310 tokens > 200000 maximum"),
        unknown_key=error("top_k: Extra inputs are not permitted"),
    ),
]  # fmt: skip
