# SPDX-License-Identifier: AGPL-3.0-or-later
"""LiteLLM's library against the front."""

import asyncio
import json

import litellm
from _scenarios import KEY, MODEL, TOOL, URL, WRONG_KEY, ask, run
from pydantic import BaseModel

litellm.telemetry = False


class Person(BaseModel):
    name: str
    age: int


def complete(text, **more):
    options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": ask(text)}
    return litellm.completion(**options | more)


def chat():
    reply = complete("What is the sky like?", max_tokens=64, temperature=0)
    return {"content": reply.choices[0].message.content, "tokens": reply.usage.total_tokens}


def asynchronous():
    options = {
        "model": f"openai/{MODEL}",
        "api_base": URL,
        "api_key": KEY,
        "messages": ask("The sky?"),
    }
    return {"content": asyncio.run(litellm.acompletion(**options)).choices[0].message.content}


def stream():
    chunks = list(complete("The sky?", stream=True, stream_options={"include_usage": True}))
    pieces = [
        chunk.choices[0].delta.content
        for chunk in chunks
        if chunk.choices and chunk.choices[0].delta.content
    ]
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1]
    return {"content": "".join(pieces), "pieces": len(pieces), "tokens": usage.total_tokens}


def tools():
    messages = ask("What is the weather in Paris?")
    first = complete("", messages=messages, tools=[TOOL]).choices[0].message
    call = first.tool_calls[0]
    messages += [
        first,
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "21"},
    ]
    second = complete("", messages=messages, tools=[TOOL]).choices[0].message
    return {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "content": second.content,
    }


def structured():
    return Person.model_validate_json(
        complete("Who?", response_format=Person).choices[0].message.content
    ).model_dump()


def reasoning():
    message = complete("reason").choices[0].message
    return {"content": message.content, "reasoning": message.reasoning_content}


def errors():
    try:
        complete("The sky?", api_key=WRONG_KEY)
    except litellm.AuthenticationError as error:
        return {"wrong_key": error.status_code}
    return "nothing was raised"


if __name__ == "__main__":
    run(chat, asynchronous, stream, tools, structured, reasoning, errors)
