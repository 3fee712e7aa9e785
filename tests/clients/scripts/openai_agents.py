# SPDX-License-Identifier: AGPL-3.0-or-later
"""The OpenAI Agents SDK against the front: two tools and a handoff, whole and streamed."""

import asyncio

from _scenarios import KEY, MODEL, URL, run
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(["get_weather", city])
    return "21 degrees"


@function_tool
def get_time(city: str) -> str:
    """The time of a city."""
    asked.append(["get_time", city])
    return "noon"


def build_clerk():
    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY))
    writer = Agent(name="Writer", instructions="You write the answer.", model=model)
    return Agent(
        name="Clerk",
        instructions="You collect facts.",
        tools=[get_weather, get_time],
        handoffs=[writer],
        model=model,
    )


def describe(result):
    return {
        "content": result.final_output,
        "asked": list(asked),
        "agent": result.last_agent.name,
        "tokens": result.context_wrapper.usage.total_tokens,
    }


def whole():
    asked.clear()
    return describe(asyncio.run(Runner.run(build_clerk(), "How is Paris?")))


def streamed():
    asked.clear()

    async def go():
        result = Runner.run_streamed(build_clerk(), "How is Paris?")
        kinds = [event.type async for event in result.stream_events()]
        return describe(result) | {"kinds": sorted(set(kinds))}

    return asyncio.run(go())


if __name__ == "__main__":
    run(whole, streamed)
