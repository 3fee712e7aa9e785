# SPDX-License-Identifier: AGPL-3.0-or-later
"""The pages on a large horde: what the server does for each, and how much a first visit loads.

Run by hand: `dev.py bench pages [--users 50000] [--workers 2000] [--statistics 1000000]`. The
application is called in this process, without HTTP. `CPU` is the processor time of this process.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flask.testing import FlaskClient
from sqlalchemy import text

from benchmarks._stack import own_database
from benchmarks.lists import fill, forget, measure_ms, noting_statements, parse_options
from horde import db
from horde.actions.dashboard import MOMENT_SECONDS
from horde.actions.statistics import compile_text_stats
from horde.app import create_app
from horde.classes.base.user import hash_api_key
from horde.config import Config

KEY = "benchmark-moderator-key"
MODEL = "vendor/model-7"
PAGES = {
    "start": ("/",),
    "model": (f"/models/{MODEL}",),
    "workers": ("/workers",),
    "teams": ("/teams",),
    "leaders": ("/leaders",),
    "news": ("/news",),
    "register": ("/register",),
    "terms": ("/terms",),
    "API": ("/api/",),
    "account": ("/account", "/account/overview"),
    "dashboard": ("/dashboard", "/dashboard/moment", "/dashboard/series?window=hour"),
}
"""The page, and what it asks for as soon as it has a key."""
POLLS = {
    "/dashboard/moment": 5,
    "/dashboard/series?window=hour": 30,
}  # seconds from one to the next


@dataclass(frozen=True)
class Row:
    """One address: milliseconds of a call that finds nothing cached, and of one from the caches."""

    page: str
    path: str
    statements: int
    cached_statements: int
    fresh_ms: float
    cached_ms: float
    fresh_cpu_ms: float
    kilobytes: float
    first_load_kilobytes: float | None  # the page with its scripts and styles; None for JSON


def get(client: FlaskClient, path: str) -> bytes:
    """The bytes of an answer, which has to be good."""
    answer = client.get(path, headers={"apikey": KEY})
    if answer.status_code != 200:
        raise RuntimeError(f"{path} answers {answer.status_code}")
    return answer.data


def list_files(client: FlaskClient, address: str, known: set[str]) -> set[str]:
    """What a page or a script loads, with what that loads."""
    content = get(client, address).decode()
    found = set(re.findall(r'(?:src|href)="(/pages/[^"]+)"', content))
    found |= {f"/pages/{name}" for name in re.findall(r'from "\./([^"]+)"', content)}
    for each in found - known:
        known |= {each}
        known |= list_files(client, each, known)
    return known


def measure(client: FlaskClient, page: str, path: str, calls: int, *, is_page: bool) -> Row:
    """One address without caches, and from them."""

    def ask() -> object:
        return get(client, path)

    forget()
    with noting_statements() as fresh:
        size = len(get(client, path))
    with noting_statements() as cached:
        ask()
    files = list_files(client, path, set()) if is_page else set()
    loaded = sum(len(get(client, name)) for name in files)
    spent = []
    for _ in range(calls):
        forget()
        began = time.process_time()
        ask()
        spent.append((time.process_time() - began) * 1000)
    return Row(
        page=page,
        path=path,
        statements=len(fresh),
        cached_statements=len(cached),
        fresh_ms=measure_ms(ask, calls, forget),
        cached_ms=measure_ms(ask, calls),
        fresh_cpu_ms=sorted(spent)[len(spent) // 2],
        kilobytes=size / 1024,
        first_load_kilobytes=(size + loaded) / 1024 if is_page else None,
    )


def compute_viewer_share(cpu_ms: Mapping[str, float]) -> float:
    """How much of a core one viewer of the dashboard costs, in percent, by the processor time of
    what it asks for. Alone it finds nothing cached, since figures are kept for less than its pause.
    """
    return sum(cpu_ms[path] / 1000 / seconds for path, seconds in POLLS.items()) * 100


def make_moderator(config: Config) -> None:
    """The account that looks."""
    with db.transaction() as session:
        values = {"key": hash_api_key(KEY, config.secret_key)}
        session.execute(text("UPDATE users SET api_key = :key WHERE id = 1"), values)
        session.execute(
            text("INSERT INTO user_roles (user_id, user_role, value) VALUES (1, 'MODERATOR', true)")
        )


def main() -> None:
    """Print a table."""
    arguments = parse_options("pages", __doc__)
    with own_database(os.environ["DATABASE_URL"]) as environment:
        fill(environment, arguments.users, arguments.workers, arguments.statistics)
        config = Config.from_environment({**environment, "HORDE_LOG_LEVEL": "WARNING"})
        client = create_app(config).test_client()
        try:
            compile_text_stats()
            make_moderator(config)
            rows = [
                measure(client, page, path, arguments.calls, is_page=index == 0)
                for page, paths in PAGES.items()
                for index, path in enumerate(paths)
            ]
        finally:
            db.disconnect()
    share = compute_viewer_share({row.path: row.fresh_cpu_ms for row in rows})
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "viewer_percent": share}))
        return
    print(
        f"{'address':30} {'SQL':>4} {'cached':>6} {'fresh ms':>9} {'cached ms':>9}"
        f" {'CPU ms':>7} {'KiB':>7} {'first load':>10}"
    )
    for row in rows:
        first = f"{row.first_load_kilobytes:.1f}" if row.first_load_kilobytes else "–"
        print(
            f"{row.path:30} {row.statements:4} {row.cached_statements:6} {row.fresh_ms:9.2f}"
            f" {row.cached_ms:9.2f} {row.fresh_cpu_ms:7.2f} {row.kilobytes:7.1f} {first:>10}"
        )
    print(
        f"one viewer of the dashboard costs {share:.2f}% of a core; the moment is kept for"
        f" {MOMENT_SECONDS:.0f} s, whoever asks"
    )


if __name__ == "__main__":
    main()
