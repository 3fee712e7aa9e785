# SPDX-License-Identifier: AGPL-3.0-or-later
"""Work on what strangers sent, in helper processes that it may hang, fill or crash.

A helper is a program of its own, run as a file, that imports nothing of this project. It answers
`READY` when it has started, then each request with one answer, both as four bytes of length and the
content.
"""

import atexit
import os
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final

HELPER_START_SECONDS: Final = 30.0  # importing a library on a busy machine
READY: Final = b"R"
LENGTH: Final = struct.Struct(">I")


class HelperUnavailable(Exception):
    """No helper is free or can be started: trouble of this machine, which no input is judged by."""


class Helper:
    """One helper process, used by one thread at a time."""

    def __init__(self, program: Path) -> None:
        # -I keeps this project, the working directory and user packages out of the helper.
        command = [sys.executable, "-I", str(program)]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C on the server is not for it. It ends when its input closes.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if self._read_answer(HELPER_START_SECONDS) != READY:
            self.kill()
            raise HelperUnavailable

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def ask(self, request: bytes, seconds: float) -> bytes | None:
        """The answer; None when the helper ran out of time or ended over it and is of no further
        use.

        Raises BrokenPipeError when it had died before.
        """
        requests, _ = self._pipes
        requests.write(LENGTH.pack(len(request)))
        requests.write(request)
        requests.flush()
        return self._read_answer(seconds)

    def _read_answer(self, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        length = self._read(LENGTH.size, deadline)
        return None if length is None else self._read(LENGTH.unpack(length)[0], deadline)

    def _read(self, size: int, deadline: float) -> bytes | None:
        _, answers = self._pipes
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        received = bytearray()
        while len(received) < size:
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                return None
            chunk = os.read(answers.fileno(), size - len(received))
            if not chunk:
                return None
            received += chunk
        return bytes(received)

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
        """In a forked child: the process belongs to the parent, so it is neither waited for nor
        warned about.
        """
        self.process.returncode = 0
        self.close_pipes()


class HelperPool:
    """The helpers of one program in this process, started when first needed; one for each fork."""

    def __init__(
        self,
        program: Path,
        *,
        max_count: int,
        max_waiting_count: int,
        wait_seconds: float,
        answer_seconds: float,
    ) -> None:
        """`max_count` helpers work at a time; `max_waiting_count` callers wait `wait_seconds` for
        one, more are turned away.

        An answer that takes longer than `answer_seconds` is given up, and its helper with it.
        """
        self._program, self._max_count, self._max_waiting_count = (
            program,
            max_count,
            max_waiting_count,
        )
        self.wait_seconds, self._answer_seconds = wait_seconds, answer_seconds
        self._reset()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._idle: list[Helper] = []
        self._slots = threading.BoundedSemaphore(self._max_count)
        self._places = threading.BoundedSemaphore(self._max_count + self._max_waiting_count)

    def ask(self, request: bytes) -> bytes | None:
        """The answer to one request; None when it was too much for its helper, which the next call
        replaces.

        Raises HelperUnavailable. No transaction may be open.
        """
        places, slots = self._places, self._slots
        if not places.acquire(blocking=False):
            raise HelperUnavailable
        try:
            if not slots.acquire(timeout=self.wait_seconds):
                raise HelperUnavailable
            try:
                return self._ask_once(request)
            finally:
                slots.release()
        finally:
            places.release()

    def _ask_once(self, request: bytes) -> bytes | None:
        try:
            return self._ask_with(self._take(), request)
        except BrokenPipeError:
            # An idle helper had been killed from outside.
            return self._ask_with(Helper(self._program), request)

    def _take(self) -> Helper:
        try:
            return self._idle.pop()
        except IndexError:
            return Helper(self._program)

    def _ask_with(self, helper: Helper, request: bytes) -> bytes | None:
        answer = None
        try:
            answer = helper.ask(request, self._answer_seconds)
        finally:
            if answer is None:
                helper.kill()
        if answer is not None:
            self._idle.append(helper)
        return answer

    def close(self) -> None:
        """End the idle helpers."""
        while self._idle:
            self._idle.pop().kill()

    def forget(self) -> None:
        """After a fork the helpers are the parent's, and a lock may have been held by a thread that
        is not here.
        """
        for helper in self._idle:
            helper.forget()
        self._reset()
