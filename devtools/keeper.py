# SPDX-License-Identifier: AGPL-3.0-or-later
"""Throw-away services for a run of tests: ``python -m devtools.keeper STATE --watch PID``.

One process of its own keeps them for all processes of the run, since each of those may end before
the others. It writes STATE/addresses.json when they answer, and stops and deletes everything on
SIGTERM or when PID is gone.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from devtools.processes import StartFailed, Stopped, raise_when_asked_to_stop, read_start_stamp
from devtools.services import ServiceAddresses, Services
from devtools.state import write_private

WATCH_SECONDS = 0.5
ADDRESSES = "addresses.json"


def main() -> int:
    """Keep services until told to stop. Returns 1 when they do not start; the reason is on
    stderr.
    """
    parser = argparse.ArgumentParser(description="Keep throw-away services.")
    parser.add_argument("state", type=Path)
    parser.add_argument("--watch", type=int, required=True, metavar="PID")
    arguments = parser.parse_args()
    watched = read_start_stamp(arguments.watch)
    services = Services(arguments.state, os.environ, durable=False)
    try:
        raise_when_asked_to_stop()
        addresses = services.start()
        write_private(arguments.state / ADDRESSES, json.dumps(dataclasses.asdict(addresses)))
        while watched is not None and read_start_stamp(arguments.watch) == watched:
            time.sleep(WATCH_SECONDS)
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    except Stopped:
        pass
    finally:
        services.stop()
        services.remove()
    return 0


def read_addresses(state: Path) -> ServiceAddresses | None:
    """What a keeper wrote, None while it is not ready."""
    try:
        return ServiceAddresses(**json.loads((state / ADDRESSES).read_text()))
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
