# SPDX-License-Identifier: AGPL-3.0-or-later
"""Files of pages as they are sent: read once, with a tag that tells whether a client has them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

STATIC_FOLDER: Final = Path(__file__).with_name("static")
HTML_TYPE: Final = "text/html"
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".html": f"{HTML_TYPE}; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".txt": "text/plain; charset=utf-8",
    }
)
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon, which keeps browsers from asking for one
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing from elsewhere, no code or style inside a page, and no markup out of text."""

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # asked for again each time, answered with 304 while it is the same
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, its `Content-Type` and its `ETag`."""

    content: bytes
    kind: str
    tag: str

    def is_known(self, if_none_match: str) -> bool:
        """Whether a client that sends this header has the file already."""
        known = [word.strip().removeprefix("W/") for word in if_none_match.split(",")]
        return self.tag in known


def read_file(path: Path) -> PageFile:
    """Read a file of a page."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return PageFile(content, KINDS[path.suffix], tag)


def read_static_files() -> dict[str, PageFile]:
    """The files that pages of every server share, by name."""
    return {path.name: read_file(path) for path in sorted(STATIC_FOLDER.iterdir())}
