# SPDX-License-Identifier: AGPL-3.0-or-later
"""An answer that is written once and read by many: JSON as bytes, packed at the first wish.

A list of two thousand workers is a megabyte of JSON, which takes longer to write than all the rest
of its request.
"""

import gzip
import json
import threading
from typing import Any

# Less fits into a packet or two anyway.
MIN_PACKED_BYTES = 1400
# The usual middle: nine levels take ten times as long for a tenth less.
GZIP_LEVEL = 5


class WrittenAnswer:
    """A JSON answer as bytes. Threads share it; nobody changes it."""

    __slots__ = ("_lock", "_packed", "_value", "body")

    def __init__(self, text: str) -> None:
        """`text` is JSON, ASCII as every answer."""
        self.body = text.encode("ascii")
        self._packed: bytes | None = None
        self._value: Any = None
        self._lock = threading.Lock()

    def read(self) -> Any:
        """The value, for who shows it in another form. Nobody changes it."""
        with self._lock:
            if self._value is None:
                self._value = json.loads(self.body)
            return self._value

    def pack(self) -> bytes | None:
        """The bytes of a gzip file; None when packing is not worth it."""
        if len(self.body) < MIN_PACKED_BYTES:
            return None
        with self._lock:
            if self._packed is None:
                self._packed = gzip.compress(self.body, GZIP_LEVEL, mtime=0)
            return self._packed
