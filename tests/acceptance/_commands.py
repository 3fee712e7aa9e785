# SPDX-License-Identifier: AGPL-3.0-or-later
"""``horde`` commands one after the other in one process, since importing takes longer than any of
them runs.

Reads a JSON array of words a line and answers with the JSON {code, output}. ``["clean-up"]`` is no
command: it runs the leader's pass over stale jobs and expired requests, as a host would that has
just become the leader.
"""

import contextlib
import io
import json
import os
import sys

from horde import db, redis_ctrl
from horde.cli.main import main
from horde.config import Config
from horde.database import threads


def run(words: list[str]) -> dict[str, object]:
    """Exit code and standard output of one command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = clean_up() if words == ["clean-up"] else main(words)
    return {"code": code, "output": output.getvalue()}


def clean_up() -> int:
    config = Config.from_environment(os.environ)
    db.connect(config)
    redis_ctrl.connect(config)
    try:
        threads.check_waiting_prompts()
    finally:
        db.disconnect()
        redis_ctrl.disconnect()
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
