# SPDX-License-Identifier: AGPL-3.0-or-later
"""How fast this machine runs Python at the moment, by which CPU times of different runs can be
compared.
"""

import time

ROUNDS = 20


def measure_unit_ms() -> float:
    """Milliseconds of CPU for a fixed piece of arithmetic, the best of some rounds; twice as many:
    half as fast a machine.
    """
    best = float("inf")
    for _ in range(ROUNDS):
        before = time.thread_time()
        sum(number * number for number in range(10_000))
        best = min(best, time.thread_time() - before)
    return best * 1000
