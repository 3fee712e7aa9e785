# SPDX-License-Identifier: AGPL-3.0-or-later
"""A small pooler in transaction mode: it lends a session of the server for one transaction, and
the next client may have the same.

It speaks just enough of the protocol to stand where pgbouncer would: no passwords from clients, no
TLS, no prepared statements.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg2

TOLD = {
    "server_version": "18.0",
    "client_encoding": "UTF8",
    "server_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "integer_datetimes": "on",
    "DateStyle": "ISO, MDY",
    "TimeZone": "UTC",
}
ALLOWED_AT_START = {
    "user",
    "database",
    "application_name",
    "client_encoding",
    "replication",
}
READY, AT_REST = b"Z", b"I"


class LendingPooler:
    """Listens until it is closed. `size` sessions of the server are all that its clients share."""

    def __init__(self, server_url: str, *, size: int = 3) -> None:
        self._sessions = [psycopg2.connect(server_url) for _ in range(size)]
        self._free = [socket.socket(fileno=_copy(session)) for session in self._sessions]
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._clients: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.refused_options: list[str] = []
        path = server_url.rpartition("/")[2]
        self.url = f"postgresql://horde@127.0.0.1:{self._listener.getsockname()[1]}/{path}"
        self._start(self._accept)

    def close(self) -> None:
        """Stop listening and end what is open."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for session in self._sessions:
            # A client may be in the middle of a statement.
            with suppress(OSError), socket.socket(fileno=os.dup(session.fileno())) as copied:
                copied.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for opened in (*self._free, *self._sessions):
            opened.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError):
            if self._greet(client):
                self._lend(client)
        client.close()

    def _greet(self, client: socket.socket) -> bool:
        """Take the start of a connection; False when it asks for what is refused."""
        while True:
            (size,) = struct.unpack("!i", _read(client, 4))
            body = _read(client, size - 4)
            if body[:4] == struct.pack("!i", 80877103):  # TLS
                client.sendall(b"N")
                continue
            break
        words = body[4:].rstrip(b"\0").split(b"\0")
        refused = {word.decode() for word in words[::2]} - ALLOWED_AT_START
        if refused:
            self.refused_options += sorted(refused)
            reason = f"unsupported startup parameter: {min(refused)}"
            fields = b"SFATAL\0C08P01\0M" + reason.encode() + b"\0\0"
            client.sendall(_pack(b"E", fields))
            return False
        told = b"".join(_pack(b"S", f"{name}\0{value}\0".encode()) for name, value in TOLD.items())
        key = _pack(b"K", struct.pack("!ii", 1, 1))  # a process that no server has
        client.sendall(_pack(b"R", struct.pack("!i", 0)) + told + key + _pack(READY, AT_REST))
        return True

    def _lend(self, client: socket.socket) -> None:
        """Give the client a session from its first word to the end of each transaction."""
        while True:
            kind, message = _read_message(client)
            with self._changed:
                self._changed.wait_for(lambda: self._free)
                server = self._free.pop()  # the one that was given back last
            try:
                is_over = False
                while not is_over:
                    if kind == b"X":
                        return
                    server.sendall(message)
                    is_over = self._answer(server, client)
                    if not is_over:
                        kind, message = _read_message(client)
            finally:
                with self._changed:
                    self._free.append(server)
                    self._changed.notify()

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket) -> bool:
        """Hand the server's answer to the client; whether its transaction is over."""
        while True:
            kind, message = _read_message(server)
            client.sendall(message)
            if kind == READY:
                return message[5:] == AT_REST


def _copy(session: "psycopg2.extensions.connection") -> int:
    """The session's socket as one of our own, blocking."""
    copied = os.dup(session.fileno())
    os.set_blocking(copied, True)
    return copied


def _pack(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _read_message(source: socket.socket) -> tuple[bytes, bytes]:
    head = _read(source, 5)
    return head[:1], head + _read(source, struct.unpack("!i", head[1:])[0] - 4)
