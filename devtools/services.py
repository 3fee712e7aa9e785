# SPDX-License-Identifier: AGPL-3.0-or-later
"""Postgres, Redis and an S3 store from wheels, for development and tests: no Docker, no root, no
system packages.

A service whose address is in the environment (DATABASE_URL, REDIS_URL, S3_ENDPOINT) is not started.
Everything listens on loopback, on free ports that differ from start to start; what has to last lies
in the state folder.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devtools.launcher import Launcher, Service
from devtools.postgres import Postgres, remove_external_data
from devtools.processes import StartFailed
from devtools.s3 import Store
from devtools.state import load_secrets
from devtools.store import WeedStore
from devtools.valkey import Valkey

BUCKET = "stable-horde-source-images"  # the default of R2_SOURCE_IMAGE_BUCKET


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
    """The services of one state folder. Call ``start`` from the main thread (see ``Child``) and
    ``stop`` at the end.

    ``durable`` keeps Redis over restarts too and waits for the disk; without it speed comes first.
    """

    def __init__(
        self, state: Path, environment: Mapping[str, str], *, durable: bool = True
    ) -> None:
        self.state = state.resolve()
        self.environment = environment
        self.durable = durable
        self.launcher = Launcher(self.state / "services.json")

    def start(self) -> ServiceAddresses:
        """Start what the environment does not provide and wait until each really works.

        Raises StartFailed, with nothing left running.
        """
        known = load_secrets(self.state)
        self.launcher.wait_for_leftovers()
        bucket = self.environment.get("R2_SOURCE_IMAGE_BUCKET", BUCKET)
        weed = valkey = postgres = None
        services: list[Service] = []
        # The store is the slowest, so it comes up while the database is made.
        if "S3_ENDPOINT" not in self.environment:
            keys = (known["s3_access_key"], known["s3_secret_key"])
            services.append(
                weed := WeedStore(self.state, access_key=keys[0], secret_key=keys[1], bucket=bucket)
            )
        if "REDIS_URL" not in self.environment:
            services.append(
                valkey := Valkey(self.state, password=known["redis_password"], durable=self.durable)
            )
        if "DATABASE_URL" not in self.environment:
            postgres = Postgres(
                self.state,
                password=known["postgres_password"],
                token=known["token"],
                durable=self.durable,
            )
            services.append(postgres)
        try:
            self.launcher.launch_all(services)
        except BaseException:
            self.stop()
            raise
        store = weed.store if weed else self.read_store()
        if weed is None:
            # Best effort: the keys may not be allowed to, and it may exist.
            store.make_bucket(bucket)
        return ServiceAddresses(
            database_url=postgres.url if postgres else self.environment["DATABASE_URL"],
            redis_url=valkey.url if valkey else self.environment["REDIS_URL"],
            s3_endpoint=store.endpoint,
            s3_access_key=store.access_key,
            s3_secret_key=store.secret_key,
            bucket=bucket,
        )

    def stop(self) -> None:
        """Stop all together, waiting for the slowest. Does nothing when nothing runs."""
        self.launcher.stop_all()

    def remove(self) -> None:
        """Delete all data of a stopped, throw-away set."""
        if (self.state / "secrets.json").exists():
            remove_external_data(load_secrets(self.state)["token"])
        shutil.rmtree(self.state, ignore_errors=True)

    def read_store(self) -> Store:
        """The store that the environment names. Raises StartFailed when its keys are missing."""
        try:
            keys = self.environment["AWS_ACCESS_KEY_ID"], self.environment["AWS_SECRET_ACCESS_KEY"]
        except KeyError as error:
            raise StartFailed(
                f"S3_ENDPOINT is set, so {error.args[0]} has to be set too"
            ) from error
        region = self.environment.get("AWS_DEFAULT_REGION", "auto")
        return Store(self.environment["S3_ENDPOINT"], keys[0], keys[1], region)
