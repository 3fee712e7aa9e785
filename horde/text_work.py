# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the text queue gained, told on Redis to whoever keeps workers waiting: hints by model.

A hint holds names and numbers alone, and hands nothing out: whoever hears one lets a worker pop.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from horde import metrics
from horde.logger import get_logger
from horde.pop_epochs import list_marks_of_models, move_marks

logger = get_logger(__name__)

TEXT_WORK_CHANNEL: Final = "horde:text_work"
# Of a pop that a front passes on: for which address. Of its answer: whether requests for the
# worker's models wait that it may not take.
POPPING_ADDRESS_HEADER: Final = "horde-popping-address"
WORK_LEFT_HEADER: Final = "horde-work-left"
# Of an answer of the API to a worker that would wait: below which address its pops may.
WAITING_POPS_HEADER: Final = "Horde-Waiting-Pops"


@dataclass(frozen=True, slots=True)
class TextWork:
    """Generations that workers may take now: `count` of one request, whose lengths are tokens. No
    models are any model.
    """

    models: tuple[str, ...]
    is_chat: bool
    count: Annotated[int, Field(ge=1)]
    max_length: int
    max_context_length: int


_WORK: Final = TypeAdapter(TextWork)


def publish_text_work(work: TextWork) -> None:
    """Tell of new work, and make idle workers of its models look again. Best effort: a failure is
    logged, counted and never reaches the caller.

    Shape: the fields of `TextWork` as JSON on `horde:text_work`. Call it after the commit it
    reports.
    """
    message = TEXT_WORK_CHANNEL, _WORK.dump_json(work).decode()
    if not move_marks(list_marks_of_models(work.models), message=message):
        metrics.signal_failures.add(1)
        logger.warning("horde.text_work.failed")


def parse_text_work(text: str) -> TextWork | None:
    """A hint; None for what is none."""
    try:
        return _WORK.validate_json(text)
    except ValidationError:
        return None
