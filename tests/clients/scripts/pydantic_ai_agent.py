# SPDX-License-Identifier: AGPL-3.0-or-later
"""Pydantic AI's agents against the front."""

import asyncio

from _scenarios import KEY, MODEL, URL, WRONG_KEY, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def build_agent(key=KEY, **options):
    return Agent(
        OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=key)), **options
    )


def chat():
    reply = build_agent(instructions="Answer briefly.").run_sync("What is the sky like?")
    return {"content": reply.output, "tokens": reply.usage.total_tokens}


def several_turns():
    agent = build_agent()
    first = agent.run_sync("The sky?")
    return {"content": agent.run_sync("And again?", message_history=first.all_messages()).output}


def stream():
    async def go():
        async with build_agent().run_stream("The sky?") as reply:
            pieces = [piece async for piece in reply.stream_text(delta=True, debounce_by=None)]
        return {"content": "".join(pieces), "pieces": len(pieces)}

    return asyncio.run(go())


def tools():
    agent, asked = build_agent(), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "21"

    return {
        "arguments": {"city": "Paris"} if asked != ["Paris"] else {"city": asked[0]},
        "content": agent.run_sync("Weather?").output,
    }


def structured():
    return build_agent(output_type=NativeOutput(Person)).run_sync("Who?").output.model_dump()


def structured_by_a_call():
    return build_agent(output_type=Person).run_sync("Who?").output.model_dump()


def errors():
    try:
        build_agent(WRONG_KEY).run_sync("The sky?")
    except ModelHTTPError as error:
        return {"wrong_key": error.status_code}
    return "nothing was raised"


if __name__ == "__main__":
    run(chat, several_turns, stream, tools, structured, structured_by_a_call, errors)
