# SPDX-License-Identifier: AGPL-3.0-or-later
"""Replies against clients' JSON Schemas, in helper processes that a hostile schema may hang or fill.

A `pattern` can backtrack for hours inside C code and a `$ref` can fan out without end, so the check runs where it can
be killed: two seconds on the clock, bounded memory, nothing fetched.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from typing import IO, Final

from horde.exceptions import ServiceUnavailable

SCHEMA_CHECK_SECONDS: Final = 2.0
HELPER_START_SECONDS: Final = 30.0  # importing the library on a busy machine
MAX_HELPER_COUNT: Final = 2  # per process; further checks wait for a free one
HELPER_WAIT_SECONDS: Final = 5.0  # for a free one, which may be starting
MAX_WAITING_COUNT: Final = 8  # beside those in a check: hostile replies sent at once must not hold every thread of a server

_PROGRAM: Final = Path(__file__).with_name("_chat_schema_helper.py")
_READY: Final = b"R"


class SchemaVerdict(Enum):
    """What the helper says of a reply; the values are its answers."""

    MATCH = b"M"
    MISMATCH = b"X"
    NOT_JSON = b"J"
    UNCOMPILABLE = b"U"


class SchemaHelperUnavailable(ServiceUnavailable):
    """No helper is free or can be started: trouble of this machine, which no reply is judged by. The worker sends it again."""

    def __init__(self) -> None:
        super().__init__("The reply cannot be checked at the moment. Send it again.")


class _Helper:
    """One helper process, used by one thread at a time."""

    def __init__(self) -> None:
        # -I keeps this project, the working directory and user packages out of the helper.
        command = [sys.executable, "-I", str(_PROGRAM)]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C on the server is not for it. It ends when its input closes.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        if self._read_letter(HELPER_START_SECONDS) != _READY:
            self.kill()
            raise SchemaHelperUnavailable

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def check(self, request: bytes) -> SchemaVerdict | None:
        """The verdict; None when the helper ran out of time or memory and is of no further use.

        Raises BrokenPipeError when it had died before.
        """
        requests, _ = self._pipes
        requests.write(request)
        requests.flush()
        letter = self._read_letter(SCHEMA_CHECK_SECONDS)
        return SchemaVerdict(letter) if letter else None

    def _read_letter(self, seconds: float) -> bytes:
        """The next answer; empty when none came in time or the helper ended."""
        _, answers = self._pipes
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        return os.read(answers.fileno(), 1) if poll.poll(seconds * 1000) else b""

    def kill(self) -> None:
        """End the process and release what belongs to it."""
        self.process.kill()
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        """Let go of the pipes; a helper whose input nobody holds ends by itself."""
        for pipe in self._pipes:
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def forget(self) -> None:
        """In a forked child: the process belongs to the parent, so it is neither waited for nor warned about."""
        self.process.returncode = 0
        self.close_pipes()


class _HelperPool:
    """Idle helpers of this process, started when first needed."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._idle: list[_Helper] = []
        self._slots = threading.BoundedSemaphore(MAX_HELPER_COUNT)
        self._places = threading.BoundedSemaphore(MAX_HELPER_COUNT + MAX_WAITING_COUNT)

    def check(self, request: bytes) -> SchemaVerdict:
        """Run one check; a helper that fails in it is replaced by the next call."""
        places, slots = self._places, self._slots
        if not places.acquire(blocking=False):
            raise SchemaHelperUnavailable
        try:
            if not slots.acquire(timeout=HELPER_WAIT_SECONDS):
                raise SchemaHelperUnavailable
            try:
                return self._check_once(request)
            finally:
                slots.release()
        finally:
            places.release()

    def _check_once(self, request: bytes) -> SchemaVerdict:
        try:
            return self._check_with(self._take(), request)
        except BrokenPipeError:
            return self._check_with(_Helper(), request)  # an idle helper had been killed from outside

    def _take(self) -> _Helper:
        try:
            return self._idle.pop()
        except IndexError:
            return _Helper()

    def _check_with(self, helper: _Helper, request: bytes) -> SchemaVerdict:
        verdict = None
        try:
            verdict = helper.check(request)
        finally:
            if verdict is None:
                helper.kill()
        if verdict is None:
            return SchemaVerdict.UNCOMPILABLE
        self._idle.append(helper)
        return verdict

    def close(self) -> None:
        """End the idle helpers."""
        while self._idle:
            self._idle.pop().kill()

    def forget(self) -> None:
        """After a fork the helpers are the parent's, and a lock may have been held by a thread that is not here."""
        for helper in self._idle:
            helper.forget()
        self._reset()


_pool: Final = _HelperPool()
os.register_at_fork(after_in_child=_pool.forget)
atexit.register(_pool.close)


def check_content_against_schema(content: str, schema: object) -> SchemaVerdict:
    """Whether a reply's text is JSON that matches a schema, by the draft its `$schema` declares or else 2020-12.

    Takes up to two seconds; no transaction may be open. A schema that does not compile, whose references do not
    resolve inside it, or that is over time or memory, is UNCOMPILABLE.
    Raises SchemaHelperUnavailable, a 503, when no helper can be started or comes free.
    """
    return _pool.check(json.dumps([content, schema]).encode() + b"\n")
