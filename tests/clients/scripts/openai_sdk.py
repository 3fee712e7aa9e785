# SPDX-License-Identifier: AGPL-3.0-or-later
"""OpenAI's Python library against the front."""

import asyncio
import json
import sys

import openai
from _scenarios import KEY, MODEL, TOOL, URL, WRONG_KEY, ask, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY)


class Person(BaseModel):
    name: str
    age: int


def chat():
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("What is the sky like?"), max_tokens=64, temperature=0
    )
    choice = reply.choices[0]
    return {
        "content": choice.message.content,
        "finish": choice.finish_reason,
        "tokens": reply.usage.total_tokens,
        "model": reply.model,
        "worker": reply.model_extra["x_horde"]["worker_name"],
        "has_request_id": bool(reply._request_id),
    }


def asynchronous():
    async def go():
        async with AsyncOpenAI(base_url=URL, api_key=KEY) as asynchronous_client:
            stream = await asynchronous_client.chat.completions.create(
                model=MODEL, messages=ask("The sky?"), stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return {"content": asyncio.run(go())}


def stream():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ask("The sky?"), stream=True, stream_options=options
        )
    )
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return {
        "content": "".join(choice.delta.content or "" for choice in told),
        "pieces": len([choice for choice in told if choice.delta.content]),
        "finish": told[-1].finish_reason,
        "tokens": chunks[-1].usage.total_tokens,
    }


def stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=ask("The sky?")) as events:
        kinds = {event.type for event in events}
        reply = events.get_final_completion()
    return {"content": reply.choices[0].message.content, "kinds": sorted(kinds)}


def stream_of_a_call():
    chunks = client.chat.completions.create(
        model=MODEL, messages=ask("Weather?"), tools=[TOOL], stream=True
    )
    calls = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    return {
        "calls": [
            [call.index, call.function.name, json.loads(call.function.arguments)] for call in calls
        ]
    }


def tools():
    messages = ask("What is the weather in Paris?")
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0]
    call = first.message.tool_calls[0]
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0]
    arguments = json.loads(call.function.arguments)
    return {
        "finish": first.finish_reason,
        "name": call.function.name,
        "arguments": arguments,
        "content": second.message.content,
    }


def structured():
    reply = client.chat.completions.parse(model=MODEL, messages=ask("Who?"), response_format=Person)
    return reply.choices[0].message.parsed.model_dump()


def reasoning():
    message = (
        client.chat.completions.create(model=MODEL, messages=ask("reason"), reasoning_effort="low")
        .choices[0]
        .message
    )
    return {"content": message.content, "reasoning": message.reasoning_content}


def models():
    listed = [model.id for model in client.models.list()]
    return {"is_listed": MODEL in listed, "retrieved": client.models.retrieve(MODEL).id}


def count_attempts(kind, **changes):
    """Which exception, with what, after how many requests."""
    attempts = []
    http = openai.DefaultHttpxClient(
        event_hooks={"request": [lambda request: attempts.append(request.url)]}
    )
    options = {"base_url": URL, "api_key": KEY, "http_client": http}
    options |= {name: changes.pop(name) for name in ("api_key",) if name in changes}
    body = {"model": MODEL, "messages": ask("The sky?")} | changes
    try:
        OpenAI(**options).chat.completions.create(**body)
    except kind as error:
        return [error.status_code, error.code, error.param, len(attempts)]
    return "nothing was raised"


def errors():
    return {
        "wrong_key": count_attempts(openai.AuthenticationError, api_key=WRONG_KEY),
        "unknown_model": count_attempts(openai.NotFoundError, model="tests/unknown-model"),
        "unsupported": count_attempts(openai.BadRequestError, logprobs=True),
        "failed": count_attempts(openai.InternalServerError, messages=ask("fail")),
    }


def error_in_a_stream():
    try:
        list(client.chat.completions.create(model=MODEL, messages=ask("fail"), stream=True))
    except openai.APIError as error:
        return {"code": error.code}
    return "nothing was raised"


def anonymous():
    reply = OpenAI(base_url=URL, api_key="0000000000").chat.completions.create(
        model=MODEL, messages=ask("The sky?")
    )
    return {"content": reply.choices[0].message.content}


def cancel():
    stream = client.chat.completions.create(model=MODEL, messages=ask("slowly"), stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    return {
        "request_id": stream.response.headers["x-horde-request-id"],
        "content": chunk.choices[0].delta.content,
    }


if __name__ == "__main__":
    scenarios = (
        chat,
        asynchronous,
        stream,
        stream_helper,
        stream_of_a_call,
        tools,
        structured,
        reasoning,
        models,
    )
    run(*scenarios, errors, error_in_a_stream, anonymous, cancel)
    print(f"openai {openai.__version__}", file=sys.stderr)
