#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-or-later
"""The commands to remember: run, stop, test, check, fmt, bench.

Any Python 3.8 or newer starts this file. It finds a Python 3.12 or newer, keeps ``.venv`` in step
with ``requirements-dev.txt``, and goes on inside it. ``python3 dev.py COMMAND --help`` explains
each command.
"""

import sys

from devtools import bootstrap, command_line


def main() -> int:
    """Run one command. Returns its exit code: 0 for success, 2 for a machine that cannot run it."""
    arguments = command_line.parse(sys.argv[1:])
    try:
        bootstrap.enter_environment(demo_model=command_line.needs_demo_model(arguments))
    except bootstrap.SetupError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2
    from devtools import commands

    return commands.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
