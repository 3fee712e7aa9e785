# SPDX-License-Identifier: AGPL-3.0-or-later
"""Start the API, as `horde serve` does."""

import sys

from horde.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
