# SPDX-License-Identifier: AGPL-3.0-or-later
"""How much longer the whole validation of a large chat body takes than `json.loads` of the same
bytes.

Run by hand: `python -m benchmarks.chat_validation`. The aim is a ratio of at most 10.
"""

import json
import time
from collections.abc import Callable

import horde.logger  # noqa: F401  first: it silences what horde_sdk prints when imported
from horde.classes.kobold.chat_request import (
    build_operation_fingerprint,
    build_stored_chat_extras,
    flatten_messages,
    parse_chat_request,
    required_chat_features,
)
from horde.json_body import parse_json_body

TEXT_BYTES = 1000 * 1000
ROUNDS = 20


def build_body(message_count: int = 1024, tool_count: int = 128) -> bytes:
    """About 1 MiB of text in many messages, with tools near their bound of 256 KiB."""
    sentence = 'The quick brown fox jumps over the lazy dog, "again" — été.\n'
    text = (sentence * (TEXT_BYTES // message_count // len(sentence.encode()) + 1))[
        : TEXT_BYTES // message_count - 10
    ]
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index in range(message_count)
    ]
    properties = {
        f"argument_{index}": {"type": "string", "description": "Where to look."}
        for index in range(24)
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{index}", "strict": True, "parameters": parameters},
        }
        for index in range(tool_count)
    ]
    while len(json.dumps(tools, separators=(",", ":"))) > 250 * 1024:
        properties.popitem()
        parameters["required"] = list(properties)
    return json.dumps(
        {"model": "m", "messages": messages, "tools": tools}, ensure_ascii=False
    ).encode()


def measure_seconds(call: Callable[[], object]) -> float:
    """The best of several rounds, which is what the code costs without the machine's other work."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Print the cost of each step and the ratio."""
    data = build_body()
    body = parse_json_body(data)
    chat = parse_chat_request(body)
    floor = measure_seconds(lambda: json.loads(data))
    steps: dict[str, Callable[[], object]] = {
        "parse_json_body": lambda: parse_json_body(data),
        "parse_chat_request": lambda: parse_chat_request(body),
        "flatten_messages": lambda: flatten_messages(chat.messages, chat.tools),
        "required_chat_features": lambda: required_chat_features(chat),
        "build_stored_chat_extras": lambda: build_stored_chat_extras(chat),
        "build_operation_fingerprint": lambda: build_operation_fingerprint(chat),
    }
    print(f"body {len(data) / 1024:.0f} KiB, json.loads {floor * 1000:.2f} ms")
    total = 0.0
    for name, step in steps.items():
        seconds = measure_seconds(step)
        total += seconds if name in ("parse_json_body", "parse_chat_request") else 0
        print(f"{name:30} {seconds * 1000:7.2f} ms {seconds / floor:6.1f} x")
    print(f"{'validation':30} {total * 1000:7.2f} ms {total / floor:6.1f} x json.loads")


if __name__ == "__main__":
    main()
