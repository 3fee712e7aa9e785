# SPDX-License-Identifier: AGPL-3.0-or-later
"""``horde`` on a host whose clock is wrong by SKEW_SECONDS. Nothing of the project may be imported
before the clock is set.
"""

import os
import sys
from datetime import timedelta

from horde import clock

_get_true_time = clock.utcnow
_SKEW = timedelta(seconds=float(os.environ["SKEW_SECONDS"]))
clock.utcnow = lambda: _get_true_time() + _SKEW

from horde.cli.main import main  # noqa: E402 - it imports the clock's function by name

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
