# SPDX-License-Identifier: AGPL-3.0-or-later
"""Starting a set of child processes, and ending it whatever happened before."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from devtools.processes import IS_LINUX, Child, StartFailed, read_start_stamp, wait_for_end
from devtools.state import write_private

START_SECONDS = 60  # a busy machine; an idle one needs under 2
# A port can be taken between the draw and the bind; a killed server's lock lingers for seconds.
START_ATTEMPTS = 6
LINGER_SECONDS = 15  # how long children of a killed launcher may take to end


RESTART_SECONDS = 600  # how long a restart counts
MOST_RESTARTS = (
    5  # of one program in that time; more is not bad luck but a fault to read in its log
)


class RestartBudget:
    """How often a program may be started again: a few times at once, and any number of times in a
    life of months.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: dict[str, list[float]] = {}

    def take(self, name: str) -> bool:
        """Count one restart of this program. Whether it is still within the budget."""
        now = self._clock()
        recent = [at for at in self._moments.get(name, []) if now - at < RESTART_SECONDS]
        self._moments[name] = [*recent, now]
        return len(recent) < MOST_RESTARTS


class Service(Protocol):
    """A server that can be started: ``build`` draws ports anew each time, ``is_ready`` asks the
    server itself.
    """

    def build(self) -> Child: ...

    def is_ready(self, child: Child) -> bool: ...


class Launcher:
    """The children of one launcher, recorded in a file so that the next launcher knows of them.
    Main thread only.
    """

    def __init__(self, record: Path) -> None:
        self.record = record
        self.children: list[Child] = []

    def launch_all(self, services: Sequence[Service]) -> None:
        """Start all at once, then wait for each, starting it anew when it ends early. Raises
        StartFailed.
        """
        launched = [(service, self.launch(service)) for service in services]
        for service, child in launched:
            self.wait_until_ready(service, child)

    def launch(self, service: Service) -> Child:
        """Start one without waiting for it. Raises StartFailed."""
        child = service.build()
        child.start()
        self.children.append(child)
        self.write_record()
        return child

    def wait_until_ready(self, service: Service, child: Child) -> None:
        """Wait for one. Raises StartFailed when it does not come up in several attempts."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                child.wait_until(service.is_ready, START_SECONDS)
                return
            except StartFailed:
                was_silent = child.is_alive()  # a new attempt would be as silent, and as long
                child.stop()
                self.children.remove(child)
                if was_silent or attempt == START_ATTEMPTS:
                    raise
            time.sleep(0.5 * attempt)
            child = self.launch(service)

    def write_record(self) -> None:
        """Process id to start stamp of each child, for ``wait_for_leftovers`` after a kill."""
        stamps = {
            child.pid: read_start_stamp(child.pid)
            for child in self.children
            if child.pid is not None
        }
        write_private(self.record, json.dumps(stamps))

    def list_process_ids(self) -> dict[str, int]:
        """Name to process id of what was started."""
        return {child.name: child.pid for child in self.children if child.pid is not None}

    def stop_all(self) -> None:
        """Stop all together, waiting for the slowest."""
        for child in self.children:
            child.ask_to_stop()
        for child in self.children:
            child.stop()
        self.children.clear()
        self.record.unlink(missing_ok=True)

    def wait_for_leftovers(self) -> None:
        """A killed launcher's children are ending by themselves and hold locks and ports until
        then.

        Where the kernel does not tell them (not Linux) they are told here: id and start time say
        that they are ours.
        """
        try:
            stamps = {
                int(pid): str(stamp) for pid, stamp in json.loads(self.record.read_text()).items()
            }
        except (OSError, ValueError):
            return
        if not IS_LINUX:
            send_signal(wait_for_end(stamps, seconds=0), signal.SIGTERM)
        send_signal(wait_for_end(stamps, LINGER_SECONDS), signal.SIGKILL)
        wait_for_end(stamps, LINGER_SECONDS)


def send_signal(process_ids: Sequence[int], number: signal.Signals) -> None:
    """Signal each; those that ended meanwhile don't matter."""
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)
