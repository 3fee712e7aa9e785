# SPDX-License-Identifier: AGPL-3.0-or-later
import io
import json
import logging

from horde.logger import configure_logging, get_logger


def test_production_writes_one_object_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", json=True, stream=stream)
    get_logger("horde.test").info(
        "horde.thing.done", extra={"worker_id": 7, "api_key": "s3cret", "text": "a\nb"}
    )
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "level": "info",
        "logger": "horde.test",
        "event": "horde.thing.done",
        "worker_id": 7,
        "api_key": "[redacted]",
        "text": "a\nb",
    }


def test_development_writes_words_that_cannot_forge_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", json=False, stream=stream)
    get_logger("horde.test").warning("horde.thing.done", extra={"worker": "a\nb c=d", "count": 2})
    (line,) = stream.getvalue().splitlines()
    assert line.split(" ", 1)[1] == 'WARNING horde.test horde.thing.done worker="a\\nb c=d" count=2'


def test_libraries_are_heard_from_warnings_up() -> None:
    stream = io.StringIO()
    configure_logging("debug", json=True, stream=stream)
    logging.getLogger("httpx").info("HTTP Request: GET http://store.test/?signature=s3cret")
    logging.getLogger("httpx").warning("trouble")
    get_logger("horde.test").debug("horde.thing.seen")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == [
        "trouble",
        "horde.thing.seen",
    ]


def test_an_exception_comes_along() -> None:
    stream = io.StringIO()
    configure_logging("info", json=True, stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("horde.test").exception("horde.thing.failed")
    event = json.loads(stream.getvalue())
    assert event["error_class"] == "builtins.ValueError"
    assert "raise ValueError" in event["stack"]
