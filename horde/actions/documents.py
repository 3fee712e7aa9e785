# SPDX-License-Identifier: AGPL-3.0-or-later
"""What an operator has to say: terms, privacy, sponsors and news."""

from pydantic import TypeAdapter, ValidationError

from horde.config import Config
from horde.database.caches import TimedCache
from horde.documents import read_document, read_news, render_html
from horde.logger import get_logger
from horde.shapes.documents import (
    DocumentFormat,
    DocumentName,
    HordeDocument,
    NewsEntry,
    Newspiece,
)

logger = get_logger(__name__)

DOCUMENT_SECONDS = 300.0

_entries = TypeAdapter(list[NewsEntry])
_documents = TimedCache[tuple[str, DocumentName], str](DOCUMENT_SECONDS)
_news = TimedCache[str, list[Newspiece]](DOCUMENT_SECONDS)


def show_document(config: Config, name: DocumentName, wanted: DocumentFormat) -> HordeDocument:
    """A document of the operator, or the one that comes with the horde; up to five minutes old."""
    markdown = _documents.get(
        (config.documents_folder, name),
        lambda: read_document(
            config.documents_folder,
            name,
            title=config.title,
            contact=config.contact_email or "its operators",
        ),
    )
    if wanted is DocumentFormat.MARKDOWN:
        return HordeDocument(markdown=markdown)
    return HordeDocument(html=render_html(markdown))


def list_news(config: Config) -> list[Newspiece]:
    """The news of the operator, the newest first; up to five minutes old."""
    folder = config.documents_folder
    return _news.get(folder, lambda: parse_news(read_news(folder)))


def parse_news(text: str) -> list[Newspiece]:
    """News as they are told, the newest first; of a text that is no list of news none."""
    try:
        entries = _entries.validate_json(text)
    except ValidationError as error:
        logger.warning("horde.document.news_invalid", extra={"error_count": error.error_count()})
        return []
    newest_first = sorted(entries, key=lambda entry: entry.date_published, reverse=True)
    return [Newspiece(**entry.model_dump()) for entry in newest_first]
