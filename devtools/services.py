# SPDX-License-Identifier: AGPL-3.0-or-later
"""Postgres, Redis and an S3 store from wheels, for development and tests: no Docker, no root, no system packages.

A service whose address is in the environment (DATABASE_URL, REDIS_URL, S3_ENDPOINT) is not started. Everything
listens on loopback, on free ports that differ from start to start; what has to last lies in the state folder.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from devtools.postgres import Postgres
from devtools.processes import IS_LINUX, Child, StartFailed, read_start_stamp, wait_for_end
from devtools.s3 import Store
from devtools.state import load_secrets, write_private
from devtools.store import WeedStore
from devtools.valkey import Valkey

BUCKET = "stable-horde-source-images"  # the default of R2_SOURCE_IMAGE_BUCKET

START_SECONDS = 60  # a busy machine; an idle one needs under 2
START_ATTEMPTS = 6  # a port can be taken between the draw and the bind; a killed server's lock lingers for seconds
LINGER_SECONDS = 15  # how long children of a killed launcher may take to end


class Service(Protocol):
    """A server that can be started: ``build`` draws new ports each time, ``is_ready`` asks the server itself."""

    def build(self) -> Child: ...

    def is_ready(self, child: Child) -> bool: ...


@dataclass(frozen=True)
class ServiceAddresses:
    """Where the services answer, as an application is told."""

    database_url: str
    redis_url: str
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    bucket: str

    def build_environment(self) -> dict[str, str]:
        """The settings that point the project at these services."""
        return {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "S3_ENDPOINT": self.s3_endpoint,
            "AWS_ACCESS_KEY_ID": self.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.s3_secret_key,
            "R2_SOURCE_IMAGE_BUCKET": self.bucket,
        }


class Services:
    """The services of one state folder. Call ``start`` from the main thread (see ``Child``) and ``stop`` at the end.

    ``durable`` keeps Redis over restarts too and waits for the disk; without it speed comes first.
    """

    def __init__(self, state: Path, environment: Mapping[str, str], *, durable: bool = True) -> None:
        self.state = state.resolve()
        self.environment = environment
        self.durable = durable
        self.children: list[Child] = []
        self.postgres: Postgres | None = None

    def start(self) -> ServiceAddresses:
        """Start what the environment does not provide and wait until each really works.

        Raises StartFailed, with nothing left running.
        """
        self.wait_for_leftovers()
        known = load_secrets(self.state)
        bucket = self.environment.get("R2_SOURCE_IMAGE_BUCKET", BUCKET)
        weed = valkey = None
        services: list[Service] = []
        # The store is the slowest, so it comes up while the database is made.
        if "S3_ENDPOINT" not in self.environment:
            keys = (known["s3_access_key"], known["s3_secret_key"])
            services.append(weed := WeedStore(self.state, access_key=keys[0], secret_key=keys[1], bucket=bucket))
        if "REDIS_URL" not in self.environment:
            services.append(valkey := Valkey(self.state, password=known["redis_password"], durable=self.durable))
        if "DATABASE_URL" not in self.environment:
            self.postgres = Postgres(self.state, password=known["postgres_password"], token=known["token"], durable=self.durable)
            services.append(self.postgres)
        try:
            self.launch_all(services)
        except BaseException:
            self.stop()
            raise
        store = weed.store if weed else self.read_store()
        if weed is None:
            store.make_bucket(bucket)  # best effort: the keys may not be allowed to, and it may exist
        return ServiceAddresses(
            database_url=self.postgres.url if self.postgres else self.environment["DATABASE_URL"],
            redis_url=valkey.url if valkey else self.environment["REDIS_URL"],
            s3_endpoint=store.endpoint,
            s3_access_key=store.access_key,
            s3_secret_key=store.secret_key,
            bucket=bucket,
        )

    def stop(self) -> None:
        """Stop all together, waiting for the slowest."""
        for child in self.children:
            child.ask_to_stop()
        for child in self.children:
            child.stop()
        self.children.clear()
        (self.state / "children.json").unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all data of a stopped, throw-away set."""
        if self.postgres is not None:
            self.postgres.remove()
        shutil.rmtree(self.state, ignore_errors=True)

    def list_process_ids(self) -> dict[str, int]:
        """Name to process id of what runs."""
        return {child.name: child.pid for child in self.children if child.pid is not None}

    def launch_all(self, services: list[Service]) -> None:
        """Start all at once, then wait for each, starting it anew when it ends early."""
        launched = [(service, self.launch(service)) for service in services]
        for service, child in launched:
            self.wait_until_ready(service, child)

    def launch(self, service: Service) -> Child:
        """Start one and remember it, also on disk, for ``wait_for_leftovers`` after a kill."""
        child = service.build()
        child.start()
        self.children.append(child)
        stamps = {child.pid: read_start_stamp(child.pid) for child in self.children if child.pid is not None}
        write_private(self.state / "children.json", json.dumps(stamps))
        return child

    def wait_until_ready(self, service: Service, child: Child) -> None:
        """Wait for one. Raises StartFailed when it does not come up in several attempts."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                child.wait_until(lambda child=child: service.is_ready(child), START_SECONDS)  # type: ignore[misc]
                return
            except StartFailed:
                child.stop()
                self.children.remove(child)
                if attempt == START_ATTEMPTS:
                    raise
            time.sleep(0.5 * attempt)
            child = self.launch(service)

    def wait_for_leftovers(self) -> None:
        """A killed launcher's servers are ending by themselves and hold locks on the data until then.

        Where the kernel does not tell them (not Linux) they are told here: id and start time say that they are ours.
        """
        try:
            stamps = {int(pid): str(stamp) for pid, stamp in json.loads((self.state / "children.json").read_text()).items()}
        except (OSError, ValueError):
            return
        if not IS_LINUX:
            send_signal(wait_for_end(stamps, seconds=0), signal.SIGTERM)
        send_signal(wait_for_end(stamps, LINGER_SECONDS), signal.SIGKILL)
        wait_for_end(stamps, LINGER_SECONDS)

    def read_store(self) -> Store:
        """The store that the environment names. Raises StartFailed when its keys are missing."""
        try:
            keys = self.environment["AWS_ACCESS_KEY_ID"], self.environment["AWS_SECRET_ACCESS_KEY"]
        except KeyError as error:
            raise StartFailed(f"S3_ENDPOINT is set, so {error.args[0]} has to be set too") from error
        region = self.environment.get("AWS_DEFAULT_REGION", "auto")
        return Store(self.environment["S3_ENDPOINT"], keys[0], keys[1], region)


def send_signal(process_ids: list[int], number: signal.Signals) -> None:
    """Signal each; those that ended meanwhile don't matter."""
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)
