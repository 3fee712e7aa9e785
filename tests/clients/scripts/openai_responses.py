# SPDX-License-Identifier: AGPL-3.0-or-later
"""OpenAI's Python library against the front, by its newer API."""

import asyncio
import json

import openai
from _scenarios import KEY, MODEL, PARAMETERS, URL, WRONG_KEY, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}


class Person(BaseModel):
    name: str
    age: int


def create():
    reply = client.responses.create(
        model=MODEL, input="What is the sky like?", max_output_tokens=64, temperature=0
    )
    return {
        "content": reply.output_text,
        "status": reply.status,
        "tokens": reply.usage.total_tokens,
        "model": reply.model,
        "worker": reply.model_extra["x_horde"]["worker_name"],
        "has_request_id": bool(reply._request_id),
    }


def asynchronous():
    async def go():
        async with AsyncOpenAI(base_url=URL, api_key=KEY) as asynchronous_client:
            stream = await asynchronous_client.responses.create(
                model=MODEL, input="The sky?", stream=True
            )
            return "".join(
                [event.delta async for event in stream if event.type.endswith("text.delta")]
            )

    return {"content": asyncio.run(go())}


def stream():
    events = list(client.responses.create(model=MODEL, input="The sky?", stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {
        "content": "".join(pieces),
        "kinds": [event.type for event in events if not event.type.endswith("delta")],
        "tokens": events[-1].response.usage.total_tokens,
    }


def stream_helper():
    with client.responses.stream(model=MODEL, input="The sky?") as events:
        kinds = {event.type for event in events}
        reply = events.get_final_response()
    return {"content": reply.output_text, "kinds": sorted(kinds)}


def tools():
    history = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model=MODEL, input=history, tools=[TOOL])
    (call,) = first.output
    history += first.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
    second = client.responses.create(model=MODEL, input=history, tools=[TOOL])
    return {
        "name": call.name,
        "arguments": json.loads(call.arguments),
        "content": second.output_text,
    }


def structured():
    reply = client.responses.parse(model=MODEL, input="Who?", text_format=Person)
    return reply.output_parsed.model_dump()


def structured_stream():
    with client.responses.stream(model=MODEL, input="Who?", text_format=Person) as events:
        return events.get_final_response().output_parsed.model_dump()


def reasoning():
    reply = client.responses.create(model=MODEL, input="reason", reasoning={"effort": "low"})
    thought, _ = reply.output
    # What came back is sent back as it is.
    again = client.responses.create(
        model=MODEL, input=[*reply.output, {"role": "user", "content": "The sky?"}]
    )
    return {
        "content": reply.output_text,
        "reasoning": thought.content[0].text,
        "again": again.output_text,
    }


def raise_error(kind, **changes):
    options = {"base_url": URL, "api_key": changes.pop("api_key", KEY)}
    try:
        OpenAI(**options).responses.create(**{"model": MODEL, "input": "The sky?"} | changes)
    except kind as error:
        return [error.status_code, error.code, error.param]
    return "nothing was raised"


def errors():
    return {
        "wrong_key": raise_error(openai.AuthenticationError, api_key=WRONG_KEY),
        "unknown_model": raise_error(openai.NotFoundError, model="tests/unknown-model"),
        "unsupported": raise_error(openai.BadRequestError, top_logprobs=2),
        "failed": raise_error(openai.InternalServerError, input="fail"),
        "lost": raise_error(openai.InternalServerError, previous_response_id="resp_1"),
    }


def cancel():
    stream = client.responses.create(model=MODEL, input="slowly", stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    return {
        "request_id": stream.response.headers["x-horde-request-id"],
        "content": event.delta,
    }


if __name__ == "__main__":
    scenarios = (create, asynchronous, stream, stream_helper, tools, structured, structured_stream)
    run(*scenarios, reasoning, errors, cancel)
