# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the text queue gained, told on Redis to whoever keeps workers waiting: hints by model.

A hint holds names and numbers alone, and hands nothing out: whoever hears one lets a worker pop.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from horde import metrics, redis_ctrl
from horde.logger import get_logger
from horde.redis_ctrl import RedisUnavailable, chat_signal_db

logger = get_logger(__name__)

TEXT_WORK_CHANNEL: Final = "horde:text_work"
# Of a pop that a front passes on: for which address. Of its answer: whether requests for the
# worker's models wait that it may not take.
POPPING_ADDRESS_HEADER: Final = "horde-popping-address"
WORK_LEFT_HEADER: Final = "horde-work-left"


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
    """Tell of new work. Best effort: a failure is logged, counted and never reaches the caller.

    Shape: the fields of `TextWork` as JSON on `horde:text_work`. Call it after the commit it
    reports.
    """
    try:
        redis_ctrl.publish(TEXT_WORK_CHANNEL, _WORK.dump_json(work).decode(), chat_signal_db)
    except RedisUnavailable:
        metrics.signal_failures.add(1)
        logger.warning("horde.text_work.failed")


def parse_text_work(text: str) -> TextWork | None:
    """A hint; None for what is none."""
    try:
        return _WORK.validate_json(text)
    except ValidationError:
        return None
