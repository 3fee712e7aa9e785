# SPDX-License-Identifier: AGPL-3.0-or-later
"""A Postgres of a test's own, to be frozen, restarted, made read-only, copied and promoted."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg2

from devtools.launcher import Launcher
from devtools.postgres import Postgres, find_programs, remove_external_data
from devtools.processes import Child
from devtools.state import load_secrets, make_state_folder

READY_SECONDS = 60


class OwnPostgres:
    """One server on one port."""

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        self.folder = folder / "state"
        make_state_folder(self.folder)
        known = load_secrets(self.folder)
        self._token = known["token"]
        self.service = Postgres(
            self.folder,
            password=password or known["postgres_password"],
            token=self._token,
            durable=False,
        )
        self._launcher = Launcher(self.folder / "services.json")
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """Its address, with the password."""
        return self.service.url

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    def start(self) -> None:
        """Return once it takes connections; a second start is on the port of the first."""
        if self._child is None:
            self._launcher.launch_all([self.service])
            self._child = self._launcher.children[-1]
            return
        self._child.start()
        self._child.wait_until(self.service.is_ready, READY_SECONDS)

    def stop(self) -> None:
        """End it quickly and in order; its sessions are told."""
        self.child.stop()

    def close(self) -> None:
        """End it whatever state it is in, and delete its data."""
        if self._child is not None:
            self.thaw()
        self._launcher.stop_all()
        remove_external_data(self._token)

    def freeze(self) -> None:
        """Let none of its processes do anything; their sockets stay open."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        parent = self.child.pid
        assert parent is not None
        children = Path(f"/proc/{parent}/task/{parent}/children")
        if not children.exists():
            return
        for process_id in [parent, *map(int, children.read_text().split())]:
            with suppress(ProcessLookupError):  # a session that just ended
                os.kill(process_id, number)

    def run(self, sql: str, *arguments: object) -> Any:
        """The first value of a statement, None when it has none."""
        with closing(psycopg2.connect(self.url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, arguments or None)
                row = cursor.fetchone() if cursor.description else None
        return None if row is None else row[0]

    def set(self, setting: str) -> None:
        """Change a setting of the running server, and wait until its sessions have heard of it."""
        self.run(f"ALTER SYSTEM SET {setting}")
        self.run("SELECT pg_reload_conf()")
        time.sleep(0.3)

    def reset(self) -> None:
        """Take back what `set` changed."""
        self.run("ALTER SYSTEM RESET ALL")
        self.run("SELECT pg_reload_conf()")
        time.sleep(0.3)

    def make_standby(self, folder: Path) -> "OwnPostgres":
        """A running copy that follows this server and refuses to write until it is promoted."""
        standby = OwnPostgres(folder, password=self.service.password)
        standby.service.make_folder()
        program = find_programs(standby.service.account) / "pg_basebackup"
        options = ["-R", "-X", "stream", "--checkpoint=fast", "--no-sync", "-d", self.url]
        standby.service.run_program([str(program), "-D", str(standby.service.data), *options])
        standby.start()
        return standby


@contextmanager
def own_postgres(folder: Path) -> Iterator[OwnPostgres]:
    """A running server, gone at the end whatever a test did to it."""
    server = OwnPostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
