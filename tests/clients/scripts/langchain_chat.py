# SPDX-License-Identifier: AGPL-3.0-or-later
"""LangChain's ChatOpenAI against the front."""

import asyncio

import openai
from _scenarios import KEY, MODEL, URL, WRONG_KEY, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=64, temperature=0)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21"


def chat():
    reply = model.invoke("What is the sky like?")
    return {"content": reply.content, "tokens": reply.usage_metadata["total_tokens"]}


def asynchronous():
    return {"content": asyncio.run(model.ainvoke("The sky?")).content}


def stream():
    chunks = list(model.stream("The sky?", stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {
        "content": whole.content,
        "pieces": len([chunk for chunk in chunks if chunk.content]),
        "tokens": whole.usage_metadata["total_tokens"],
    }


def tools():
    bound = model.bind_tools([get_weather])
    messages = [HumanMessage("What is the weather in Paris?")]
    first = bound.invoke(messages)
    call = first.tool_calls[0]
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    return {
        "name": call["name"],
        "arguments": call["args"],
        "content": bound.invoke(messages).content,
    }


def structured():
    return model.with_structured_output(Person).invoke("Who?").model_dump()


def structured_by_a_call():
    return (
        model.with_structured_output(Person, method="function_calling").invoke("Who?").model_dump()
    )


def errors():
    try:
        ChatOpenAI(base_url=URL, api_key=WRONG_KEY, model=MODEL).invoke("The sky?")
    except openai.AuthenticationError as error:
        return {"wrong_key": error.code}
    return "nothing was raised"


if __name__ == "__main__":
    run(chat, asynchronous, stream, tools, structured, structured_by_a_call, errors)
