# SPDX-License-Identifier: AGPL-3.0-or-later
"""A gate before a real service: it forwards bytes, and while it is closed nothing listens at its
address.
"""

import contextlib
import socket
import threading
import urllib.parse

CHUNK = 65536


class TcpGate:
    """Forwards connections to a service; `close` cuts them and refuses new ones until `open`."""

    def __init__(self, service_url: str) -> None:
        parts = urllib.parse.urlsplit(service_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._listener: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.port = 0
        self.connection_count = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_closed(self) -> bool:
        return self._listener is None

    def lead_to(self, service_url: str) -> None:
        """Forward new connections to another service; those there are stay where they are."""
        parts = urllib.parse.urlsplit(service_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)

    def open(self) -> None:
        """Listen, at the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def close(self) -> None:
        """Stop listening and cut what is connected."""
        listener, self._listener = self._listener, None
        with self._lock:
            cut, self._sockets = self._sockets, set()
        for one in (*cut, *([listener] if listener else [])):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(60)
        self._threads = []

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connection_count += 1
            try:
                service = socket.create_connection(self._target)
            except OSError:  # nobody is there just now
                client.close()
                continue
            with self._lock:
                is_closed = self._listener is not listener
                if not is_closed:
                    self._sockets |= {client, service}
            if is_closed:
                client.close()
                service.close()
                return
            self._start(self._forward, client, service)
            self._start(self._forward, service, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
