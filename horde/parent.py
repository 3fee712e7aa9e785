# SPDX-License-Identifier: AGPL-3.0-or-later
"""A process that must not outlive the one that made it, whatever ended that one."""

import ctypes
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def end_with_parent(stop_signal: signal.Signals) -> None:
    """Ask the kernel to send this signal to the calling process when its parent ends. Linux only.

    It is sent when the *thread* that forked this process ends, so the parent has to fork in one
    that lives as long as itself. A parent that ended before the call sends nothing: whoever
    calls this compares `os.getppid` too.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(stop_signal), 0, 0, 0)


def limit_remaining_life(seconds: int) -> None:
    """End the calling process after this time by the kernel, whatever its threads are stuck in.

    For a process that nobody is left to kill. Main thread only.
    """
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
