# SPDX-License-Identifier: AGPL-3.0-or-later
"""Structured logs: one event a line, JSON in production and plain text in development.

An event is a constant name with fields: ``logger.info("horde.job_submit.done",
extra={"generation_id": id})``. Field names must not be those of ``logging.LogRecord`` (``name``,
``args``, ``message``, ...): the standard library refuses them.

Keys, prompts and replies are never logged. The formatters also blank fields whose name says that
they hold one; that is a net under the rule, not a replacement for it.
"""

import json
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from loguru import logger as loguru_logger

# The SDK and the model reference talk through loguru, whose default handler prints to stderr in a
# format of its own, from the moment they are imported. An entry point that imports this module
# first stays silent.
for _package in ("horde_model_reference", "horde_sdk"):
    loguru_logger.disable(_package)

SECRET_FIELDS = frozenset(
    {
        "api_key",
        "apikey",
        "authorization",
        "content",
        "generation",
        "key",
        "messages",
        "password",
        "prompt",
        "reply",
        "secret",
        "secret_key",
        "token",
        "tools",
    }
)
REDACTED = "[redacted]"

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "message",
    "taskName",
}


# Made once: `json.dumps` makes one for each line.
_write_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(level: str, json: bool, stream: TextIO | None = None) -> None:
    """Send the events of this project to stderr, and only warnings of the libraries.

    ``level`` is a name of the standard library's levels in any case. Calling it again replaces what
    was set before. Raises ``ValueError`` for an unknown level.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # httpx logs each URL at INFO, and a signed URL is a secret.
    root.setLevel(logging.WARNING)
    logging.getLogger("horde").setLevel(level.upper())
    threading.excepthook = _log_ended_thread
    # No line names the place, thread or process it comes from, and finding them costs more than
    # writing it.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _log_ended_thread(ended: threading.ExceptHookArgs) -> None:
    """Say what ended a thread; the standard library would print the error's text, which may quote
    what must not be logged.
    """
    if ended.exc_value is not None:
        get_logger(__name__).error(
            "horde.thread.ended", extra=build_failure_fields(ended.exc_value)
        )


def build_event_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields a caller passed in ``extra``, secrets blanked."""
    return {
        name: REDACTED if name.lower() in SECRET_FIELDS else value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES
    }


@contextmanager
def surviving(work: str) -> Iterator[None]:
    """Let a long-lived thread or task go on after an error that nobody foresaw. The log has its
    class and place, and not its text.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  whoever ends here would be missed until a restart
        get_logger(__name__).error(
            "horde.thread.survived", extra={"work": work, **build_failure_fields(error)}
        )


def build_failure_fields(error: BaseException) -> dict[str, str]:
    """Return the class of an error and where it came from, without its text, which may quote a
    prompt, a key or a row.
    """
    return {
        "error_class": f"{type(error).__module__}.{type(error).__qualname__}",
        "stack": "".join(traceback.format_tb(error.__traceback__)),
    }


def build_exception_fields(record: logging.LogRecord) -> dict[str, str]:
    """Return what a line says of the exception it was logged with: as of every failure, no text."""
    error = record.exc_info[1] if record.exc_info else None
    return {} if error is None else build_failure_fields(error)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``event``, the fields,
    ``exception`` when there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        event |= {
            name: value for name, value in build_event_fields(record).items() if name not in event
        }
        event |= build_exception_fields(record)
        return _write_json(event)


class TextFormatter(logging.Formatter):
    """``12:00:00.000 INFO horde.bridge.loop horde.bridge.job_done id=... kudos=1.5``, local
    time.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the event on one line, followed by the traceback when there is one."""
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        # Quoting everything that is not a plain word keeps a value with a line break from forging a
        # second event.
        fields = [
            f"{name}={_quote_unless_plain(str(value))}"
            for name, value in build_event_fields(record).items()
        ]
        event = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = " ".join([moment, record.levelname, record.name, event, *fields])
        failure = build_exception_fields(record)
        return "\n".join([line, *failure.values()]).rstrip()


def _quote_unless_plain(value: str) -> str:
    return (
        value
        if value.isprintable() and value and not set(value) & set(' "=')
        else json.dumps(value, ensure_ascii=False)
    )
