# SPDX-License-Identifier: AGPL-3.0-or-later
"""Documents and news as files: those of the operator's folder, and defaults for those it lacks.

Files are read when they are asked for, so that a change needs no restart. A file that cannot be
read is logged and its default is sent.
"""

from pathlib import Path
from string import Template

from markdown_it import MarkdownIt

from horde.logger import get_logger

logger = get_logger(__name__)

DEFAULTS = Path(__file__).parent / "data" / "documents"
MAX_DOCUMENT_BYTES = 1024 * 1024

# Without HTML: what stands in a document is text, whoever may write the file.
_markdown = MarkdownIt("commonmark", {"html": False}).enable("table")


def read_document(folder: str, name: str, **words: str) -> str:
    """A document as Markdown, `$title` and the like replaced by the words given."""
    text = _read_own(folder, f"{name}.md")
    if text is None:
        text = (DEFAULTS / f"{name}.md").read_text(encoding="utf-8")
    return Template(text).safe_substitute(words)


def read_news(folder: str) -> str:
    """The news as JSON."""
    return _read_own(folder, "news.json") or "[]"


def render_html(markdown: str) -> str:
    """Markdown as HTML."""
    return str(_markdown.render(markdown))


def _read_own(folder: str, name: str) -> str | None:
    """A file of the operator's folder; None when there is none that can be used."""
    if not folder:
        return None
    path = Path(folder) / name
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise ValueError("too long")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "horde.document.unreadable",
            extra={"document": name, "error_class": type(error).__name__},
        )
        return None
