# SPDX-License-Identifier: AGPL-3.0-or-later
"""Hostile requests by the thousand against the whole API in this process: what was wrong, and how
long the slowest took.

Run by hand: `dev.py bench fuzz --requests 20000`, with `--front` through the OpenAI-compatible
front, with `--form messages` in one of its forms alone. A seed repeats a run;
`tests/integration/test_fuzz.py` and `test_chat_front_fuzz.py` run short ones.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from devtools.services import ServiceAddresses
from tests.integration._fuzz_front import FORMS, FuzzFront, fuzz_front
from tests.integration._fuzz_horde import FuzzHorde, fuzz_horde

REPORT_EVERY = 1000
SHOWN_PROBLEMS = 50


def read_addresses() -> ServiceAddresses:
    """The services that dev.py started, as the environment has them."""
    read = os.environ
    return ServiceAddresses(
        database_url=read["DATABASE_URL"],
        redis_url=read["REDIS_URL"],
        s3_endpoint=read["S3_ENDPOINT"],
        s3_access_key=read["AWS_ACCESS_KEY_ID"],
        s3_secret_key=read["AWS_SECRET_ACCESS_KEY"],
        bucket=read["R2_SOURCE_IMAGE_BUCKET"],
    )


def print_summary(horde: FuzzHorde, seconds: float) -> None:
    """How the requests ended, and every kind of problem with its first example."""
    answered = horde.statuses.total()
    print(
        f"\n{answered} requests answered in {seconds:.0f} s, the slowest in {horde.slowest[0]:.2f}"
        f" s: {horde.slowest[1]}"
    )
    by_status = Counter[int]()
    for (_, status), count in horde.statuses.items():
        by_status[status] += count
    print(
        "by status: "
        + ", ".join(f"{status}: {count}" for status, count in sorted(by_status.items()))
    )
    print("by rc: " + ", ".join(f"{code}: {count}" for code, count in horde.codes.most_common()))
    print(f"{len(horde.problems)} problems")
    for problem in horde.problems[:SHOWN_PROBLEMS]:
        print(problem)


def print_front_summary(front: FuzzFront, seconds: float) -> None:
    """How the requests to the front ended, and every kind of problem with its first example."""
    answered = front.statuses.total()
    print(
        f"\n{answered} requests answered in {seconds:.0f} s, the slowest in {front.slowest[0]:.2f}"
        f" s: {front.slowest[1]}"
    )
    print(
        "by status: "
        + ", ".join(f"{status}: {count}" for status, count in sorted(front.statuses.items()))
    )
    print("by code: " + ", ".join(f"{code}: {count}" for code, count in front.codes.most_common()))
    print(f"{len(front.problems)} problems")
    for problem in front.problems[:SHOWN_PROBLEMS]:
        print(problem)


def attack_front(requests: int, seed: int, form: str | None) -> int:
    """Attack the front, and print what happened. 1 when anything was wrong."""
    random, started = Random(seed), time.monotonic()
    with fuzz_front(read_addresses(), f"fuzz_{form}") as front:
        front.form = form
        for done in range(0, requests, REPORT_EVERY):
            front.attack(random, min(REPORT_EVERY, requests - done))
            print(
                f"{front.statuses.total()} answered, {len(front.problems)} problems",
                file=sys.stderr,
                flush=True,
            )
        print_front_summary(front, time.monotonic() - started)
        return 1 if front.problems else 0


def main(words: Sequence[str]) -> int:
    """Attack, and print what happened. 1 when anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench fuzz", description="Send hostile requests to the whole API."
    )
    parser.add_argument("--requests", type=int, default=20_000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="repeats a run (%(default)s)")
    parser.add_argument("--front", action="store_true", help="through the OpenAI-compatible front")
    parser.add_argument("--form", choices=sorted(FORMS), help="of the front alone, with --front")
    options = parser.parse_args(words)
    if options.front or options.form:
        return attack_front(options.requests, options.seed, options.form)
    random, started = Random(options.seed), time.monotonic()
    with fuzz_horde(read_addresses(), "fuzz") as horde:
        for done in range(0, options.requests, REPORT_EVERY):
            horde.attack(random, min(REPORT_EVERY, options.requests - done))
            print(
                f"{horde.statuses.total()} answered, {len(horde.problems)} problems",
                file=sys.stderr,
                flush=True,
            )
        print_summary(horde, time.monotonic() - started)
        return 1 if horde.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
