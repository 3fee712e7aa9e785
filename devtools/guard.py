# SPDX-License-Identifier: AGPL-3.0-or-later
"""Becomes another program that ends when its launcher does: ``guard.py PARENT SIGNAL UID GID
PROGRAM [ARGUMENT ...]``.

A process between fork and exec may do next to nothing safely when its parent has threads; this
small program, run by itself, may do what it likes, and keeps its process id when it becomes the
real one. UID and GID are -1 for no change.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Change account, tie the process to its parent, exec. Ends with 127 when there is no such
    program.
    """
    parent, stop_signal, uid, gid = (int(word) for word in sys.argv[1:5])
    command = sys.argv[5:]
    # A shell starts background jobs with these ignored, which exec would hand on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    if gid >= 0:
        os.setgroups([])
        os.setgid(gid)
    if uid >= 0:
        os.setuid(uid)
    # After the change of account, which would forget it. Only Linux has it; see
    # Launcher.wait_for_leftovers for others.
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop_signal, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


main()
