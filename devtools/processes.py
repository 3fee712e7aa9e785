# SPDX-License-Identifier: AGPL-3.0-or-later
"""Child processes that never outlive their launcher, the accounts they run under, and free
ports.
"""

import contextlib
import os
import platform
import pwd
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# Linux lends ports from here on to outgoing connections, so a server may find its fixed one taken.
EPHEMERAL_PORTS_START = 32768
LOWEST_PORT = 12000  # above the ports of everyday servers

IS_LINUX = platform.system() == "Linux"

GUARD = Path(__file__).with_name("guard.py")

STOP_SECONDS = 15  # a store with a full write-back cache needs some; then it is killed


class Stopped(BaseException):
    """Somebody asked this process to end (see ``raise_when_asked_to_stop``); like
    KeyboardInterrupt, not an error.
    """


class CannotRun(Exception):
    """What was asked for cannot work on this machine; the message is one sentence that says why."""


class StartFailed(Exception):
    """A child ended or stayed silent while it was to come up; the message ends with its last log
    lines.
    """


def find_free_ports(count: int) -> list[int]:
    """Different loopback ports nobody listens on, below the ephemeral range. Raises OSError when
    there are none.
    """
    ports: list[int] = []
    for port in random.sample(range(LOWEST_PORT, EPHEMERAL_PORTS_START), 2000):
        if is_port_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"no {count} free ports between {LOWEST_PORT} and {EPHEMERAL_PORTS_START}")


def is_port_free(port: int) -> bool:
    """Whether a server could bind this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a closed connection is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_port_permitted(port: int) -> None:
    """Raise CannotRun for a port that this account may not listen on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise CannotRun(
                f"port {port} may be used by root alone on this machine; choose one from 1024 on"
            ) from None
        except OSError:  # it is taken, which may be over in a moment
            return


@dataclass(frozen=True)
class Account:
    """An account to run a child under; ``None`` in its place means our own."""

    name: str
    uid: int
    gid: int

    def can(self, mode: str, path: Path) -> bool:
        """Ask the kernel, as that account, whether ``test -<mode> path`` holds."""
        answer = subprocess.run(
            ["/usr/bin/env", "test", f"-{mode}", str(path)],
            cwd="/",
            **self.build_subprocess_options(),
        )
        return bool(answer.returncode == 0)

    def build_subprocess_options(self) -> dict[str, Any]:
        """The keyword arguments of ``subprocess`` that change to this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


def find_unprivileged_account() -> Account | None:
    """For servers that refuse root: ``postgres``, else ``nobody``. None when we are not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise StartFailed("running as root needs an account named postgres or nobody for the database")


@dataclass
class Child:
    """One process of ours, its log and how to end it.

    ``start`` has to be called from the main thread: on Linux the child is told to end when the
    *thread* that started it does, so that a killed launcher leaves nothing running.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    working_directory: Path = Path("/")
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    port: int | None = None  # that it has to have, also when it is started again
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output is appended to the log."""
        uid, gid = (self.account.uid, self.account.gid) if self.account else (-1, -1)
        ties = [str(number) for number in (os.getpid(), int(self.stop_signal), uid, gid)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *ties, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.working_directory,
                # Ctrl-C is for the launcher, which stops the children in order.
                start_new_session=True,
            )

    def wait_for_port(self, seconds: float) -> None:
        """Wait until its port can be bound: processes of an ended program may hold it for a while.

        Returns after that time too, since the program itself says best what is wrong then.
        """
        deadline = time.monotonic() + seconds
        while self.port and not is_port_free(self.port) and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def pid(self) -> int | None:
        """Its process id, also after its end; None before its start."""
        return self.process.pid if self.process else None

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def wait_until(self, is_ready: Callable[["Child"], bool], seconds: float) -> None:
        """Poll until ready. Raises StartFailed when it ends first or the time is over."""
        deadline = time.monotonic() + seconds
        pause = 0.02
        while not is_ready(self):
            if not self.is_alive():
                raise StartFailed(
                    f"{self.name} ended with"
                    f" {self.process and self.process.returncode}\n{self.read_log_tail()}"
                )
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"{self.name} did not answer within {seconds:.0f} s\n{self.read_log_tail()}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def read_log_tail(self, line_count: int = 15) -> str:
        """The end of its log, each line indented."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-line_count:]
        except OSError as error:
            lines = [f"(no log: {error})"]
        return "\n".join(f"  {line}" for line in lines)

    def ask_to_stop(self) -> None:
        """Send its stop signal and return at once."""
        if self.process is not None and self.is_alive():
            self.process.send_signal(self.stop_signal)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End it and wait; kill it when it takes too long."""
        if self.process is None:
            return
        self.ask_to_stop()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def read_start_stamp(pid: int) -> str | None:
    """Something that differs between two processes that had the same id; None when there is none
    now.
    """
    if IS_LINUX:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = status.rpartition(")")[2].split()  # the name in brackets may hold spaces
        return None if fields[0] == "Z" else fields[19]  # proc(5): starttime
    answer = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None


def wait_for_end(stamps: Mapping[int, str], seconds: float) -> list[int]:
    """Wait until these processes (id to start stamp) are gone. Returns the ids of those that are
    not.
    """
    deadline = time.monotonic() + seconds
    while alive := [pid for pid, stamp in stamps.items() if read_start_stamp(pid) == stamp]:
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.05)
    return []


def raise_when_asked_to_stop() -> None:
    """From now on SIGTERM, SIGINT and SIGHUP raise Stopped in the main thread, once; what follows
    is for cleaning up.
    """
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        signals.append(signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    for each in signals:
        signal.signal(each, stop)
