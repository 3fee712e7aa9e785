# SPDX-License-Identifier: AGPL-3.0-or-later
"""Anthropic's Python library against the front."""

import asyncio

import anthropic
from _scenarios import KEY, MODEL, PARAMETERS, URL, WRONG_KEY, ask, run
from anthropic import Anthropic, AsyncAnthropic

BASE_URL = URL.removesuffix("/v1")
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": PARAMETERS,
}
client = Anthropic(base_url=BASE_URL, api_key=KEY)


def create(text: str, **changes: object):
    """A message, as the library gives it."""
    return client.messages.create(
        **({"model": MODEL, "max_tokens": 64, "messages": ask(text)} | changes)
    )


def chat():
    reply = create("What is the sky like?", extra_body={"temperature": 0}, system="Be brief.")
    return {
        "content": reply.content[0].text,
        "stop": reply.stop_reason,
        "tokens": reply.usage.input_tokens + reply.usage.output_tokens,
        "model": reply.model,
        "worker": reply.model_extra["x_horde"]["worker_name"],
        "has_request_id": bool(reply._request_id),
    }


def bearer():
    with Anthropic(base_url=BASE_URL, auth_token=KEY, api_key=None) as other:
        reply = other.messages.create(model=MODEL, max_tokens=64, messages=ask("The sky?"))
    return {"content": reply.content[0].text}


def asynchronous():
    async def go():
        async with (
            AsyncAnthropic(base_url=BASE_URL, api_key=KEY) as other,
            other.messages.stream(model=MODEL, max_tokens=64, messages=ask("The sky?")) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    return {"content": asyncio.run(go())}


def stream():
    events = list(create("The sky?", stream=True))
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    return {
        "content": "".join(texts),
        "pieces": len(texts),
        "kinds": sorted({event.type for event in events}),
        "stop": events[-2].delta.stop_reason,
    }


def stream_helper():
    with client.messages.stream(model=MODEL, max_tokens=64, messages=ask("The sky?")) as events:
        pieces = list(events.text_stream)
        message = events.get_final_message()
    return {
        "content": message.content[0].text,
        "joined": "".join(pieces),
        "tokens": message.usage.input_tokens + message.usage.output_tokens,
    }


def tools():
    messages = ask("What is the weather in Paris?")
    first = create("", messages=messages, tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    messages.append({"role": "user", "content": [result]})
    second = create("", messages=messages, tools=[TOOL])
    return {
        "stop": first.stop_reason,
        "name": call.name,
        "arguments": call.input,
        "content": second.content[0].text,
    }


def stream_of_a_call():
    with client.messages.stream(
        model=MODEL, max_tokens=64, messages=ask("Weather?"), tools=[TOOL]
    ) as events:
        kinds = {event.type for event in events}
        (call,) = events.get_final_message().content
    return {"name": call.name, "arguments": call.input, "has_json": "input_json" in kinds}


def tool_runner():
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "21"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=64,
        tools=[get_weather],
        messages=ask("What is the weather in Paris?"),
    )
    return {"content": runner.until_done().content[0].text, "asked": asked}


def reasoning():
    reply = create("reason", thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text = reply.content
    return {
        "content": text.text,
        "reasoning": thinking.thinking,
        "signed": bool(thinking.signature),
    }


def count():
    counted = client.messages.count_tokens(model=MODEL, messages=ask("The sky?"), tools=[TOOL])
    return {"tokens": counted.input_tokens}


def models():
    listed = [model.id for model in client.models.list()]
    return {"is_listed": MODEL in listed, "retrieved": client.models.retrieve(MODEL).id}


def errors():
    def see(options, changes):
        attempts = 0

        class Counting(anthropic.DefaultHttpxClient):
            def send(self, *words, **more):
                nonlocal attempts
                attempts += 1
                return super().send(*words, **more)

        sent = {"model": MODEL, "max_tokens": 64, "messages": ask("The sky?")} | changes
        with (
            Counting() as http,
            Anthropic(
                **({"base_url": BASE_URL, "api_key": KEY, "http_client": http} | options)
            ) as other,
        ):
            try:
                other.messages.create(**sent)
            except anthropic.APIStatusError as error:
                return [
                    type(error).__name__,
                    error.status_code,
                    error.body["error"]["type"],
                    bool(error.request_id),
                    attempts,
                ]
        return "nothing was raised"

    return {
        "wrong_key": see({"api_key": WRONG_KEY}, {}),
        "unknown_model": see({}, {"model": "tests/unknown-model"}),
        "unsupported": see({}, {"extra_body": {"top_k": 40}}),
        "failed": see({}, {"messages": ask("fail")}),
    }


def error_in_a_stream():
    try:
        with client.messages.stream(model=MODEL, max_tokens=64, messages=ask("fail")) as events:
            events.get_final_message()
    except anthropic.APIStatusError as error:
        return {"type": error.body["error"]["type"]}
    return "nothing was raised"


def cancel():
    with client.messages.stream(model=MODEL, max_tokens=64, messages=ask("slowly")) as events:
        content = next(iter(events.text_stream))
        return {
            "request_id": events.response.headers["x-horde-request-id"],
            "content": content,
        }


run(
    chat,
    bearer,
    asynchronous,
    stream,
    stream_helper,
    tools,
    stream_of_a_call,
    tool_runner,
    reasoning,
    count,
    models,
    errors,
    error_in_a_stream,
    cancel,
)
