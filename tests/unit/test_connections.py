# SPDX-License-Identifier: AGPL-3.0-or-later
import socket
import threading
from collections.abc import Iterator

import pytest

from horde import connections
from horde.connections import BoundedSocket, ClientTooSlow, NoPlaceToWait


@pytest.fixture
def places() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(1)


@pytest.fixture
def pair(places: threading.BoundedSemaphore) -> Iterator[tuple[socket.socket, BoundedSocket]]:
    """A client's end and the server's."""
    client, accepted = socket.socketpair()
    with client, BoundedSocket(accepted, places) as server:
        yield client, server


def test_bytes_that_are_there_need_no_place(
    pair: tuple[socket.socket, BoundedSocket], places: threading.BoundedSemaphore
) -> None:
    client, server = pair
    client.sendall(b"ready")
    places.acquire()
    assert server.recv(100) == b"ready"
    client.close()
    assert server.recv(100) == b""


def test_waiting_without_a_place_is_refused_and_with_one_goes_on(
    pair: tuple[socket.socket, BoundedSocket], places: threading.BoundedSemaphore
) -> None:
    client, server = pair
    places.acquire()
    with pytest.raises(NoPlaceToWait):
        server.recv(100)
    places.release()
    threading.Timer(0.2, client.sendall, [b"late"]).start()
    assert server.recv(100) == b"late"
    assert places.acquire(blocking=False), "the place is given back"


def test_a_trickle_ends_although_no_single_pause_is_long(
    pair: tuple[socket.socket, BoundedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.3)
    client, server = pair
    gone = threading.Event()

    def trickle() -> None:
        while not gone.wait(0.02):
            client.send(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    try:
        with pytest.raises(ClientTooSlow):
            list(iter(lambda: server.recv(100), b""))
    finally:
        gone.set()
        trickling.join()


def test_what_was_received_buys_time(
    pair: tuple[socket.socket, BoundedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.0)
    client, server = pair
    client.sendall(bytes(connections.SLOWEST_BYTES_PER_SECOND * 4))
    received = 0
    while received < connections.SLOWEST_BYTES_PER_SECOND * 4:
        received += len(server.recv(1 << 20))
    threading.Timer(0.2, client.sendall, [b"more"]).start()
    assert server.recv(100) == b"more"


def test_each_request_of_a_connection_starts_anew(
    pair: tuple[socket.socket, BoundedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.1)
    client, server = pair
    with pytest.raises(ClientTooSlow):
        server.recv(100)
    with pytest.raises(ClientTooSlow):
        server.recv(100)
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 5.0)
    server.begin_request()
    threading.Timer(0.2, client.sendall, [b"next"]).start()
    assert server.recv(100) == b"next"
