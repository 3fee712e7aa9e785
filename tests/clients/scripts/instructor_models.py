# SPDX-License-Identifier: AGPL-3.0-or-later
"""Instructor's typed replies against the front."""

import instructor
from _scenarios import KEY, MODEL, URL, WRONG_KEY, ask, run
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def build_client(mode, key=KEY):
    return instructor.from_openai(OpenAI(base_url=URL, api_key=key), mode=mode)


def structured():
    client = build_client(instructor.Mode.JSON_SCHEMA)
    return client.chat.completions.create(
        model=MODEL, messages=ask("Who?"), response_model=Person
    ).model_dump()


def structured_by_a_call():
    client = build_client(instructor.Mode.TOOLS)
    return client.chat.completions.create(
        model=MODEL, messages=ask("Who?"), response_model=Person
    ).model_dump()


def structured_by_an_object():
    client = build_client(instructor.Mode.JSON)
    return client.chat.completions.create(
        model=MODEL, messages=ask("Who?"), response_model=Person
    ).model_dump()


def stream():
    client = build_client(instructor.Mode.JSON_SCHEMA)
    partial = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=ask("Who?"), response_model=Person
        )
    )
    return partial[-1].model_dump()


def errors():
    client = build_client(instructor.Mode.TOOLS, WRONG_KEY)
    try:
        client.chat.completions.create(
            model=MODEL, messages=ask("Who?"), response_model=Person, max_retries=0
        )
    except Exception as error:  # noqa: BLE001  whatever a library raises is what is seen
        return {"mentions_the_key": "key" in str(error).lower()}
    return "nothing was raised"


if __name__ == "__main__":
    run(structured, structured_by_a_call, structured_by_an_object, stream, errors)
