# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bridge streams: a scripted backend behind it and a scripted horde in front of it, over real
sockets.
"""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, override

import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature

from horde.bridge import pace, progress, streaming
from horde.bridge.backend import Backend
from horde.bridge.config import BridgeConfig
from horde.bridge.horde_api import HordeApi
from horde.bridge.inputs import InputFetcher
from horde.bridge.loop import Bridge
from tests.acceptance._scripted_stream import (
    DONE,
    END,
    JOB_ID,
    KEY,
    NO_JOB,
    USAGE,
    WAIT_SECONDS,
    Answer,
    BackendHandler,
    Post,
    Step,
    StreamingBackend,
    StreamingHorde,
    chunk,
    event,
    wait_until,
)
from tests.services import ROOT

NOW = {"index": 0, "id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": NO_PARAMETERS}}]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "IDLE_STEPS", ((0, 0.01),))
    monkeypatch.setattr(pace, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(progress, "POST_SECONDS", 0.1)
    monkeypatch.setattr(progress, "RETRY_SECONDS", (0.02, 0.05))


@contextlib.contextmanager
def running_bridge(horde_url: str, backend_url: str, **changes: Any) -> Iterator[Bridge]:
    """A bridge in a thread of its own, stopped at the end of the block."""
    facts: dict[str, Any] = {
        "worker_name": "streamer",
        "max_length": 1024,
        "grace_seconds": 0.5,
        **changes,
    }
    config = BridgeConfig(
        api_url=f"{horde_url}/api", api_key=KEY, backend_url=f"{backend_url}/v1", **facts
    )
    horde, backend = (
        HordeApi(config.api_url, KEY, config.bridge_agent),
        Backend(config.backend_url, None),
    )
    inputs = InputFetcher()
    bridge = Bridge(config, horde, backend, inputs)
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        yield bridge
    finally:
        bridge.stop()
        thread.join(WAIT_SECONDS)
        for connection in (horde, backend, inputs):
            connection.close()


@pytest.fixture
def horde() -> Iterator[StreamingHorde]:
    with StreamingHorde().running() as server:
        yield server


@contextlib.contextmanager
def serving(
    horde: StreamingHorde, steps: Sequence[Step], **changes: Any
) -> Iterator[StreamingBackend]:
    """A bridge between the horde and a backend with this script."""
    about_backend = {
        name: changes.pop(name) for name in ("content_type", "status") if name in changes
    }
    with (
        StreamingBackend(steps, **about_backend).running() as backend,
        running_bridge(horde.url, backend.url, **changes),
    ):
        yield backend


def serve(horde: StreamingHorde, steps: Sequence[Step], **payload: Any) -> dict[str, Any]:
    """Hand out one streamed job; what is submitted for it."""
    with serving(horde, steps, supports=frozenset()):
        horde.hand_out(**payload)
        return horde.wait_for_submit()


def test_what_is_written_is_posted_before_the_reply_is_submitted(horde: StreamingHorde) -> None:
    steps = horde.post_each(chunk(content="Blue"), chunk(content=", or"), chunk(content=" red."))
    with serving(horde, [chunk(role="assistant", content=None), *steps, END]) as backend:
        horde.hand_out()
        reply = horde.wait_for_submit()
    assert [post["delta"] for post in horde.posts] == [
        {"content": "Blue"},
        {"content": ", or"},
        {"content": " red."},
    ]
    assert [(post["id"], post["seq"]) for post in horde.posts] == [
        (JOB_ID, 1),
        (JOB_ID, 2),
        (JOB_ID, 3),
    ]
    assert reply == {
        "id": JOB_ID,
        "model_id": "scripted",
        "message": {"role": "assistant", "content": "Blue, or red."},
        "finish_reason": "stop",
        "native_finish_reason": "stop",
        "prompt_tokens": 21,
        "completion_tokens": 5,
    }
    (request,) = backend.requests
    assert (request["stream"], request["stream_options"]) == (True, {"include_usage": True})


def test_a_job_without_the_hint_is_not_posted(horde: StreamingHorde) -> None:
    whole = b'{"choices":[{"message":{"content":"Blue."},"finish_reason":"stop"}]}'
    with serving(horde, [whole], content_type="application/json") as backend:
        horde.hand_out(stream_progress=False)
        assert horde.wait_for_submit()["message"]["content"] == "Blue."
    assert (horde.posts, backend.requests[0]["stream"]) == ([], False)


def test_reasoning_is_posted_beside_the_content(horde: StreamingHorde) -> None:
    steps = horde.post_each(
        chunk(reasoning_content="Hm"), chunk(reasoning_content=", yes."), chunk(content="Blue.")
    )
    reply = serve(horde, [*steps, END])
    assert [post["delta"] for post in horde.posts] == [
        {"content": "", "reasoning_content": "Hm"},
        {"content": "", "reasoning_content": ", yes."},
        {"content": "Blue."},
    ]
    assert reply["message"] == {
        "role": "assistant",
        "content": "Blue.",
        "reasoning_content": "Hm, yes.",
    }


def test_a_think_block_is_posted_as_reasoning(horde: StreamingHorde) -> None:
    pieces = ["<th", "ink>", "\nHm", ".\n</th", "ink>\n\n", "Blue", " one."]
    reply = serve(
        horde, [step for piece in pieces for step in (chunk(content=piece), 0.12)] + [END]
    )
    assert (horde.join("reasoning_content"), horde.join()) == ("Hm.", "Blue one.")
    assert (reply["message"]["reasoning_content"], reply["message"]["content"]) == (
        "Hm.",
        "Blue one.",
    )


def test_a_fast_backend_is_posted_in_pieces_of_tokens(
    horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "POST_SECONDS", 30.0)
    tokens = [chunk(content=f"{n} ") for n in range(300)]
    steps = [
        tokens[0],
        horde.has_accepted(1),
        *tokens[1:64],
        0.3,
        tokens[64],
        horde.has_accepted(2),
    ]
    reply = serve(horde, [*steps, *tokens[65:], END])
    first, second, *others = [post["delta"]["content"].count(" ") for post in horde.posts]
    assert (first, second) == (1, 64)
    assert all(count >= 64 for count in others)
    assert reply["message"]["content"].startswith(horde.join())


def test_a_slow_horde_does_not_slow_the_backend(horde: StreamingHorde) -> None:
    release = threading.Event()
    finished = threading.Event()

    def stall(_: Post) -> bool:
        release.wait(WAIT_SECONDS)
        return True

    class Finished(threading.Event):
        def is_set(self) -> bool:
            finished.set()
            return True

    horde.answer_post = stall
    with serving(horde, [*(chunk(content=f"{n} ") for n in range(500)), Finished(), END]):
        horde.hand_out()
        # The backend got rid of everything while the first post has no answer.
        assert finished.wait(WAIT_SECONDS)
        assert len(horde.posts) <= 1
        release.set()
        reply = horde.wait_for_submit()
    assert reply["message"]["content"] == "".join(f"{n} " for n in range(500))


def test_a_post_whose_answer_was_lost_is_sent_again_unchanged(horde: StreamingHorde) -> None:
    horde.answer_post = lambda post: None if len(horde.posts) in (1, 2, 4) else True
    reply = serve(horde, [*horde.post_each(*(chunk(content=piece) for piece in "abcdefgh")), END])
    first, second, third, fourth, fifth, *_ = horde.posts
    assert first == second == third
    assert fourth == fifth
    assert [post["seq"] for post in horde.accepted] == list(range(1, len(horde.accepted) + 1))
    assert reply["message"]["content"] == "abcdefgh"
    assert "abcdefgh".startswith(horde.join())


def test_what_was_written_while_the_horde_was_away_goes_into_the_next_post(
    horde: StreamingHorde,
) -> None:
    away = threading.Event()
    horde.answer_post = lambda post: (
        (503, {"rc": "ChatProgressUnavailable", "message": "No."}) if away.is_set() else True
    )
    back = threading.Event()
    with serving(
        horde,
        [
            chunk(content="a"),
            back,
            chunk(content="b"),
            chunk(content="c"),
            lambda: horde.join() == "abc",
            END,
        ],
    ):
        horde.hand_out()
        wait_until(lambda: len(horde.accepted) == 1)
        away.set()
        back.set()
        horde.wait_for_posts(3)
        away.clear()
        reply = horde.wait_for_submit()
    assert reply["message"]["content"] == "abc"
    assert horde.join() == "abc"
    assert len({post["seq"] for post in horde.posts[1:3]}) == 1


def test_a_horde_without_progress_gets_the_reply_alone(horde: StreamingHorde) -> None:
    horde.answer_post = lambda post: (503, {"rc": "ChatProgressUnavailable", "message": "No."})
    assert (
        serve(
            horde, [chunk(content="Blue"), lambda: len(horde.posts) > 1, chunk(content="."), END]
        )["message"]["content"]
        == "Blue."
    )
    assert (len(horde.posts) > 1, horde.accepted) == (True, [])


@pytest.mark.parametrize(
    ("status", "rc"),
    [
        (413, "ChatProgressCapReached"),
        (404, "ChatProgressNotStreaming"),
        (404, ""),
        (403, "WrongCredentials"),
        (400, "BadRequest"),
        (409, "ChatProgressOutOfSequence"),
    ],
)
def test_a_refused_post_ends_the_posting_and_not_the_job(
    horde: StreamingHorde, status: int, rc: str
) -> None:
    horde.answer_post = lambda post: (status, {"rc": rc, "message": "No."})
    reply = serve(
        horde, [step for piece in "abcd" for step in (chunk(content=piece), 0.12)] + [END]
    )
    assert (len(horde.posts), reply["message"]["content"]) == (1, "abcd")


def test_a_horde_that_forgot_posts_gets_their_text_again(horde: StreamingHorde) -> None:
    has_forgotten = threading.Event()

    def forget_once(post: Post) -> bool:
        if post["seq"] == 4 and not has_forgotten.is_set():
            has_forgotten.set()
            del horde.accepted[1:]
        return True

    horde.answer_post = forget_once
    steps = horde.post_each(*(chunk(content=piece) for piece in "abc"))
    reply = serve(
        horde,
        [*steps, chunk(content="d"), has_forgotten, horde.has_accepted(2), chunk(content="e"), END],
    )
    assert reply["message"]["content"] == "abcde"
    assert horde.accepted[1] == {"id": JOB_ID, "seq": 2, "delta": {"content": "bcd"}}
    assert "abcde".startswith(horde.join())


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"accepted_seq": 1, "cancelled": True}),
        (404, {"rc": "ChatJobAborted", "message": "Gone."}),
    ],
)
def test_a_job_nobody_waits_for_stops_the_backend_and_is_not_submitted(
    horde: StreamingHorde, answer: Any
) -> None:
    never = threading.Event()
    with serving(horde, [chunk(content="Blue"), never, END]) as backend:
        horde.answer_post = lambda post: answer if len(horde.posts) == 1 else True
        horde.hand_out()
        assert backend.was_hung_up.wait(WAIT_SECONDS)
        backend.steps = [chunk(content="next"), END]
        horde.hand_out()
        assert horde.wait_for_submit()["message"]["content"] == "next"
    assert horde.submits.empty()


def test_calls_are_submitted_whole_and_never_posted(horde: StreamingHorde) -> None:
    pieces = [
        NOW,
        {"index": 0, "function": {"arguments": "{"}},
        {"index": 0, "function": {"arguments": "}"}},
    ]
    calls = [chunk(tool_calls=[piece]) for piece in pieces]
    steps = [*horde.post_each(chunk(content="Let me see.")), *calls, 0.2, chunk("tool_calls"), DONE]
    with serving(horde, steps, supports=frozenset({ChatFeature.TOOLS})):
        horde.hand_out(tools=TOOLS)
        reply = horde.wait_for_submit()
    assert [post["delta"] for post in horde.posts] == [{"content": "Let me see."}]
    (call,) = reply["message"]["tool_calls"]
    assert (call["function"], reply["message"]["content"]) == (
        {"name": "now", "arguments": "{}"},
        "Let me see.",
    )
    assert reply["finish_reason"] == "tool_calls"


def test_characters_are_never_cut(horde: StreamingHorde) -> None:
    raw = event(
        {"choices": [{"index": 0, "delta": {"content": "é😀\u2028ü"}, "finish_reason": None}]}
    )
    halves = [chunk(content="\ud83d"), chunk(content="\ude00")]
    escaped = [
        half.decode("utf-8", "surrogatepass").encode("ascii", "backslashreplace") for half in halves
    ]
    steps: list[Step] = [step for byte in raw for step in (bytes([byte]), 0.005)]
    reply = serve(
        horde, [*steps, escaped[0], 0.2, escaped[1], lambda: horde.join().endswith("ü😀"), END]
    )
    assert reply["message"]["content"] == horde.join() == "é😀\u2028ü😀"


@pytest.mark.parametrize(
    "ending",
    [
        chunk("stop"),  # without [DONE]
        chunk("stop") + DONE.strip(),  # without the last blank line
        DONE,  # without a finish reason
        (chunk("stop") + DONE).replace(b"\n", b"\r\n"),
    ],
)
def test_a_stream_may_end_in_several_ways(horde: StreamingHorde, ending: bytes) -> None:
    reply = serve(horde, [b": ping\n\n", chunk(content="Blue."), b": ping\n\n", ending])
    assert (reply["message"]["content"], reply["finish_reason"]) == ("Blue.", "stop")


def test_a_backend_that_answers_whole_is_served(horde: StreamingHorde) -> None:
    whole = (
        b'{"choices":[{"message":{"content":"Blue."},"finish_reason":"length"}],'
        b'"usage":{"completion_tokens":2}}'
    )
    with serving(horde, [whole], content_type="application/json; charset=utf-8"):
        horde.hand_out()
        reply = horde.wait_for_submit()
    assert (reply["message"]["content"], reply["finish_reason"], reply["completion_tokens"]) == (
        "Blue.",
        "length",
        2,
    )


@pytest.mark.parametrize(
    "ending",
    [
        b"",  # the connection ends
        event({"error": {"code": 500, "message": "out of memory"}}),
        b'event: error\ndata: {"message": "out of memory"}\n\n',
        b'error: {"code": 500, "message": "out of memory"}\n\n',
        b"data: {no json\n\n",
    ],
)
def test_a_stream_that_breaks_off_gives_the_job_back(horde: StreamingHorde, ending: bytes) -> None:
    reply = serve(horde, [*horde.post_each(chunk(content="Blue")), ending])
    assert (reply["state"], reply["fault_reason"]) == ("faulted", "generation_error")
    assert horde.join() == "Blue"


def test_a_refusal_before_the_stream_has_its_reason(horde: StreamingHorde) -> None:
    refusal = b'{"error": {"type": "exceed_context_size_error", "message": "too long"}}'
    with serving(horde, [refusal], content_type="application/json", status=400):
        horde.hand_out()
        assert horde.wait_for_submit()["fault_reason"] == "prompt_overflow"


def test_a_backend_that_sends_comments_is_alive(
    horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 1.0)
    pings = [step for _ in range(60) for step in (b": ping\n\n", 0.05)]
    reply = serve(horde, [chunk(content="Blue"), *pings, END])
    assert reply["message"]["content"] == "Blue"


def test_a_backend_that_looks_for_a_call_may_be_silent_as_long_as_the_lease_lasts(
    horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.3)
    call = chunk("tool_calls", tool_calls=[{**NOW, "function": {"name": "now"}}])
    steps = [chunk(content="Let me see."), 1.5, call, DONE]
    with serving(horde, steps, supports=frozenset({ChatFeature.TOOLS})):
        horde.hand_out(tools=TOOLS)
        assert horde.wait_for_submit()["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_a_stalled_backend_is_left(horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.5)
    with serving(horde, [chunk(content="Blue"), threading.Event()]) as backend:
        horde.hand_out()
        assert horde.wait_for_submit()["fault_reason"] == "generation_error"
        assert backend.was_hung_up.wait(WAIT_SECONDS)


def test_a_backend_that_keeps_the_finished_stream_open_is_not_waited_for(
    horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FINISH_SECONDS", 0.2)
    with serving(
        horde, [chunk(content="Blue."), chunk("stop") + USAGE, threading.Event()]
    ) as backend:
        horde.hand_out()
        reply = horde.wait_for_submit()
        assert backend.was_hung_up.wait(WAIT_SECONDS)
    assert (reply["message"]["content"], reply["completion_tokens"]) == ("Blue.", 5)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@contextlib.contextmanager
def raw_backend(head: bytes, drop: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A backend that answers chats and texts with ``head`` and then with ``drop`` for ever. The
    event says that the bridge hung up.
    """
    was_hung_up = threading.Event()

    class Trickler(BackendHandler):
        @override
        def do_POST(self) -> None:
            self.read_json()
            self.close_connection = True
            try:
                self.wfile.write(head)
                while True:
                    self.take(drop)
                    self.take(0.02)
            except (ConnectionError, TimeoutError):
                was_hung_up.set()

    server = StreamingBackend()
    server.RequestHandlerClass = Trickler
    with server.running() as backend:
        yield backend.url, was_hung_up


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),  # a header that never ends
        (HEAD + b"\r\n", b": ping\n\n"),
        (HEAD.replace(b"text/event-stream", b"application/json") + b"\r\n", b" "),
    ],
)
def test_a_backend_that_trickles_for_ever_is_left_at_the_end_of_the_lease(
    horde: StreamingHorde,
    monkeypatch: pytest.MonkeyPatch,
    head: bytes,
    drop: bytes,
    is_chat: bool,
    is_streamed: bool,
) -> None:
    monkeypatch.setattr("horde.bridge.lease.MIN_BACKEND_SECONDS", 0.5)
    monkeypatch.setattr(streaming, "MIN_BACKEND_SECONDS", 0.5)
    with raw_backend(head, drop) as (url, was_hung_up), running_bridge(horde.url, url):
        if is_chat:
            horde.hand_out(ttl=1, stream_progress=is_streamed)
        else:
            payload = {"prompt": "Once", "max_length": 32, "max_context_length": 1024}
            horde.jobs.put({**NO_JOB, "id": JOB_ID, "ids": [JOB_ID], "ttl": 1, "payload": payload})
        assert horde.wait_for_submit()["state"] == "faulted"
        assert was_hung_up.wait(WAIT_SECONDS)


def test_posts_keep_the_lease(horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LEASE_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(streaming, "MIN_BACKEND_SECONDS", 0.1)
    reply = serve(
        horde, [chunk(content="a"), 1.8, chunk(content="b"), 1.8, chunk(content="c"), END], ttl=3
    )
    assert reply["message"]["content"] == "abc"


def test_the_end_of_the_lease_stops_the_backend(
    horde: StreamingHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MIN_BACKEND_SECONDS", 0.1)
    with serving(horde, [chunk(content="a"), threading.Event()]) as backend:
        horde.hand_out(ttl=1)
        assert horde.wait_for_submit()["fault_reason"] == "generation_error"
        assert backend.was_hung_up.wait(WAIT_SECONDS)


def test_a_real_backend_is_streamed(horde: StreamingHorde, tiny_backend: str) -> None:
    with running_bridge(horde.url, tiny_backend):
        horde.hand_out(max_length=64, seed=7)
        streamed = horde.wait_for_submit()
        horde.hand_out(max_length=64, seed=7, stream_progress=False)
        whole = horde.wait_for_submit()
    assert streamed == whole
    assert streamed["completion_tokens"] > 0
    assert horde.posts
    assert streamed["message"]["content"].startswith(horde.join())


def test_a_cancel_frees_a_real_backend(horde: StreamingHorde, tiny_backend: str) -> None:
    horde.answer_post = lambda post: (
        (200, {"accepted_seq": post["seq"], "cancelled": True}) if len(horde.posts) == 1 else True
    )
    with running_bridge(horde.url, tiny_backend, max_length=2000):
        horde.hand_out(max_length=2000)
        horde.wait_for_posts(1)
        horde.hand_out(max_length=8)
        assert horde.wait_for_submit()["completion_tokens"] <= 8
    assert horde.submits.empty()


def test_forced_calls_of_a_real_backend_are_not_posted(
    horde: StreamingHorde, tiny_backend: str
) -> None:
    with running_bridge(horde.url, tiny_backend):
        horde.hand_out(tools=TOOLS, tool_choice="required")
        reply = horde.wait_for_submit()
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert horde.posts == []


@contextlib.contextmanager
def running_example(horde_url: str, folder: Path) -> Iterator[None]:
    """The worker that the how-to prints."""
    page = (ROOT / "docs/how-to/write-a-streaming-worker.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "worker.py").write_text(program)
    process = subprocess.Popen([sys.executable, str(folder / "worker.py"), f"{horde_url}/api", KEY])
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)


def test_the_printed_worker_streams(horde: StreamingHorde, tmp_path: Path) -> None:
    troubles: list[Answer] = [None, (502, b"<html>Bad Gateway</html>")]
    horde.answer_post = lambda post: (
        troubles[len(horde.posts) - 1] if len(horde.posts) <= len(troubles) else True
    )
    with running_example(horde.url, tmp_path):
        words = (
            "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
            " fifteen sixteen"
        )
        horde.hand_out(
            messages=[{"role": "user", "content": f"{words} seventeen eighteen nineteen twenty"}]
        )
        reply = horde.wait_for_submit()
    assert horde.posts[0] == horde.posts[1] == horde.posts[2]
    assert len(horde.accepted) > 1
    assert reply["message"]["content"].startswith(horde.join())
    assert reply["message"]["content"].split()[-1] == "twenty"


def test_the_printed_worker_stops_when_nobody_waits(horde: StreamingHorde, tmp_path: Path) -> None:
    answers = [
        (404, {"rc": "ChatJobAborted", "message": "Gone."}),
        (200, {"accepted_seq": 1, "cancelled": True}),
    ]
    horde.answer_post = lambda post: (
        answers[len(horde.posts) - 1] if len(horde.posts) <= len(answers) else (413, {"rc": "x"})
    )
    with running_example(horde.url, tmp_path):
        for _ in range(3):
            horde.hand_out(messages=[{"role": "user", "content": "one two three"}])
        assert horde.wait_for_submit()["message"]["content"] == "one two three "
    assert (len(horde.posts), horde.submits.empty()) == (3, True)
