# SPDX-License-Identifier: AGPL-3.0-or-later
"""How long the horde lets this worker keep a job."""

import time

DEFAULT_LEASE_SECONDS = 150.0  # what every text and chat job gets, should a horde not say
LEASE_MARGIN_SECONDS = 3.0  # to hand in the fault while the lease still holds
MIN_BACKEND_SECONDS = 5.0


class Lease:
    """A job's lease, in seconds of ``time.monotonic``. One thread renews it, others may look at
    it.
    """

    def __init__(self, seconds: float = DEFAULT_LEASE_SECONDS) -> None:
        self._seconds = seconds
        self.ends = time.monotonic() + seconds

    def renew(self, since: float) -> None:
        """Begin it anew from a moment, as the horde does with each progress post it appends.

        The horde's cap is not known here. A job that reaches it is refused at its next post.
        """
        self.ends = max(self.ends, since + self._seconds)

    @property
    def seconds_left(self) -> float:
        """How long the backend may take."""
        return max(self.ends - LEASE_MARGIN_SECONDS - time.monotonic(), MIN_BACKEND_SECONDS)
