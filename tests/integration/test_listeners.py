# SPDX-License-Identifier: AGPL-3.0-or-later
"""The thread that hears what other processes changed."""

import threading
import time

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.config import Config

WAIT_SECONDS = 20


def test_a_listener_goes_on_after_its_handler_failed(service_urls: ServiceAddresses) -> None:
    config = Config(database_url="", redis_url=service_urls.redis_url, secret_key="x")
    redis_ctrl.connect(config)
    heard: list[str] = []
    gaps: list[None] = []

    def handle(message: str) -> None:
        heard.append(message)
        if message == "fails":
            raise RuntimeError("unforeseen")

    stop = threading.Event()
    thread = threading.Thread(
        target=redis_ctrl.listen, args=("horde:test", handle, lambda: gaps.append(None), stop)
    )
    thread.start()
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not gaps:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        redis_ctrl.publish("horde:test", "fails")
        while heard[-1:] != ["goes on"]:
            assert time.monotonic() < deadline
            redis_ctrl.publish("horde:test", "goes on")
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
        redis_ctrl.disconnect()
    assert heard[0] == "fails"
    assert len(gaps) == 2  # what came meanwhile may have been missed
