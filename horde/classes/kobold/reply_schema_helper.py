# SPDX-License-Identifier: AGPL-3.0-or-later
"""The program of the helper process that compiles clients' schemas; run as a file, so it imports
nothing of this project.

Reads JSON `[content, schema]` and answers each with one letter; see `reply_schema.py`, which starts
it, and `horde.helper_process` for the framing.
"""

import json
import resource
import signal
import struct
import sys
import warnings
from typing import Any, BinaryIO, NoReturn

import jsonschema
from referencing import Registry

READY, MATCH, MISMATCH, NOT_JSON, UNCOMPILABLE = b"R", b"M", b"X", b"J", b"U"
LENGTH = struct.Struct(">I")
MEMORY_BYTES = 768 * 1024 * 1024  # address space: a 10 MiB reply takes a third of it
LONGEST_CHECK_SECONDS = 4  # the parent gives up earlier; this ends a helper whose parent is gone


def check(content: str, schema: Any) -> bytes:
    """The verdict on one reply. A schema that does not compile, resolve or end is judged as such,
    never raised.
    """
    try:
        value = json.loads(content, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return NOT_JSON
    try:
        validator_class = jsonschema.validators.validator_for(
            schema, default=jsonschema.Draft202012Validator
        )
        validator_class.check_schema(schema)
        # An empty registry retrieves nothing: references resolve inside the schema or not at all.
        validator = validator_class(schema, registry=Registry())
        return MATCH if validator.is_valid(value) else MISMATCH
    except Exception:  # noqa: BLE001  a hostile schema may break the library in any way
        return UNCOMPILABLE


def refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are not JSON."""
    raise ValueError(name)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end."""
    answer(answers, READY)
    while length := requests.read(LENGTH.size):
        signal.alarm(LONGEST_CHECK_SECONDS)
        content, schema = json.loads(requests.read(LENGTH.unpack(length)[0]))
        answer(answers, check(content, schema))
        signal.alarm(0)


def answer(answers: BinaryIO, content: bytes) -> None:
    """Send one answer."""
    answers.write(LENGTH.pack(len(content)) + content)
    answers.flush()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # jsonschema warns of unknown drafts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)
