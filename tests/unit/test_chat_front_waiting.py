# SPDX-License-Identifier: AGPL-3.0-or-later
"""When a status is read and what it means, on a clock of the test."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from horde.oai.errors import NativeUnavailable, WaitFailed, WaitFailure
from horde.oai.mapping import CompletedReply, parse_completed_reply
from horde.oai.native import Caller, NativeBusy, NativeClient, NativeFamily, NativeGone
from horde.oai.signals import ChatNotice, NoticeKind, ProgressEntry
from horde.oai.waiting import RequestWait, WaitSettings, wait_for_first_status, wait_for_reply

WAITING: dict[str, Any] = {
    "generations": [],
    "impossible_reason": None,
    "processing": 0,
    "waiting": 1,
    "done": False,
    "faulted": False,
    "wait_time": 6,
    "queue_position": 1,
    "is_possible": True,
    "eligible_worker_threads": 1,
}
IMPOSSIBLE = WAITING | {"is_possible": False, "eligible_worker_threads": 0}
RUNNING = WAITING | {"processing": 1, "waiting": 0}
SERVED = WAITING | {
    "generations": [{"message": {"content": "Blue."}, "model": "m", "worker_id": "w"}],
    "done": True,
}
FAULTED = WAITING | {"faulted": True, "fault_reason": "r", "fault_rc": "c"}
GAP = WAITING | {
    "impossible_reason": {"missing_declarations": ["seed"], "exceeded_limits": []},
    "is_possible": False,
}

type Scripted = Mapping[str, Any] | Exception


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeNative:
    """Answers readings with what was scripted, the last one for ever; notes when it was asked."""

    def __init__(self, clock: Clock, *answers: Scripted, cancelled: Scripted = WAITING) -> None:
        self._clock, self._answers, self._cancelled = clock, list(answers), cancelled
        self.read_at: list[float] = []
        self.cancel_count = 0

    async def read_status(
        self, _request_id: str, _caller: Caller, _deadline: float, _family: NativeFamily
    ) -> Mapping[str, Any]:
        self.read_at.append(self._clock.now - 100.0)
        return self._give(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])

    async def cancel(
        self, _request_id: str, _caller: Caller, _family: NativeFamily
    ) -> Mapping[str, Any]:
        self.cancel_count += 1
        return self._give(self._cancelled)

    @staticmethod
    def _give(answer: Scripted) -> Mapping[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeSubscription:
    """Notices at their moments; waiting moves the clock."""

    def __init__(
        self,
        clock: Clock,
        notices: Sequence[tuple[float, ChatNotice]] = (),
        *,
        is_healthy: bool = True,
    ) -> None:
        self._clock, self._notices, self.is_healthy = clock, list(notices), is_healthy

    async def next_notice(self, timeout_seconds: float) -> ChatNotice | None:
        await asyncio.sleep(0)
        end = self._clock.now + timeout_seconds
        if self._notices and self._notices[0][0] + 100.0 <= end:
            moment, notice = self._notices.pop(0)
            self._clock.now = max(self._clock.now, moment + 100.0)
            if notice.kind is NoticeKind.LOST:
                self.is_healthy = False
            return notice
        self._clock.now = end
        return None

    async def next_entries(self, timeout_seconds: float) -> Sequence[ProgressEntry]:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError


class Scene:
    """One wait with everything around it."""

    def __init__(
        self,
        *answers: Scripted,
        notices: Sequence[tuple[float, NoticeKind]] = (),
        is_healthy: bool = True,
        is_fail_fast: bool = False,
        budget: float = 540.0,
        grace: float = 60.0,
        cancelled: Scripted = WAITING,
    ) -> None:
        self.clock = Clock()
        self.native = FakeNative(self.clock, *answers, cancelled=cancelled)
        self.subscription = FakeSubscription(
            self.clock,
            [(moment, ChatNotice(kind)) for moment, kind in notices],
            is_healthy=is_healthy,
        )
        settings = WaitSettings(
            poll_seconds=2.0,
            subscribed_poll_seconds=10.0,
            grace_seconds=grace,
            is_fail_fast=is_fail_fast,
        )
        native = cast(NativeClient, self.native)
        self.wait: RequestWait[CompletedReply] = RequestWait(
            native,
            Caller("k", None, None),
            "id",
            settings,
            100.0 + budget,
            self.clock,
            parse_reply=parse_completed_reply,
        )

    def run(self) -> str | None:
        """The content of the reply."""

        async def play() -> str | None:
            first = await wait_for_first_status(self.wait, self.subscription)
            reply = first or await wait_for_reply(self.wait, self.subscription)
            return reply.content

        return asyncio.run(play())

    def fail(self) -> WaitFailed:
        with pytest.raises(WaitFailed) as raised:
            self.run()
        return raised.value


def test_the_status_is_read_right_after_subscribing() -> None:
    scene = Scene(SERVED)
    assert scene.run() == "Blue."
    assert scene.native.read_at == [0.0]
    assert scene.native.cancel_count == 0


def test_a_healthy_subscription_is_polled_every_ten_seconds() -> None:
    scene = Scene(WAITING, WAITING, RUNNING, SERVED)
    scene.run()
    assert scene.native.read_at == [0.0, 10.0, 20.0, 30.0]


def test_only_the_first_notice_is_followed_by_a_read_within_a_second_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = (NoticeKind.RECONNECTED, NoticeKind.GENERATION, NoticeKind.DONE)
    notices = [(moment, kind) for moment, kind in zip((0.25, 0.5, 0.75), kinds, strict=True)]
    scene, real_sleep = Scene(WAITING, RUNNING, RUNNING, SERVED, notices=notices), asyncio.sleep

    async def sleep(seconds: float) -> None:
        scene.clock.now += seconds
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    scene.run()
    assert scene.native.read_at == [0.0, 0.25, 1.25, 2.25]


@pytest.mark.parametrize(
    ("status", "place"),
    [
        ({"processing": 0, "queue_position": 3}, 3),
        ({"processing": 0, "queue_position": 0}, None),  # not counted yet
        ({"processing": 1, "queue_position": 0}, 0),
        ({"processing": 0}, None),
    ],
)
def test_how_a_request_waits_is_what_the_last_reading_says(
    status: dict[str, int], place: int | None
) -> None:
    scene = Scene({**WAITING, "queue_position": None, "wait_time": 7, **status})
    asyncio.run(scene.wait.read_status())
    assert scene.wait.describe() == {"queue_position": place, "wait_time": 7, "kudos": None}


def test_without_one_the_status_is_polled_every_two_seconds() -> None:
    scene = Scene(WAITING, RUNNING, SERVED, is_healthy=False)
    scene.run()
    assert scene.native.read_at == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "kind", [NoticeKind.GENERATION, NoticeKind.DONE, NoticeKind.FAULTED, NoticeKind.RECONNECTED]
)
def test_a_notice_is_followed_by_a_reading_at_once(kind: NoticeKind) -> None:
    scene = Scene(WAITING, SERVED, notices=[(3.5, kind)])
    scene.run()
    assert scene.native.read_at == [0.0, 3.5]


def test_a_lost_subscription_shortens_the_interval() -> None:
    scene = Scene(WAITING, SERVED, notices=[(1.5, NoticeKind.LOST)])
    scene.run()
    assert scene.native.read_at == [0.0, 2.0]


def test_a_signal_before_the_row_shows_it_is_read_again_soon() -> None:
    scene = Scene(WAITING, RUNNING, SERVED, notices=[(1.0, NoticeKind.GENERATION)])
    scene.run()
    assert scene.native.read_at == [0.0, 1.0, 3.0]


def test_a_limited_reading_waits_as_long_as_it_is_told() -> None:
    scene = Scene(WAITING, NativeBusy(7.0), SERVED, notices=[(1.0, NoticeKind.GENERATION)])
    scene.run()
    assert scene.native.read_at == [0.0, 1.0, 8.0]


def test_a_limited_reading_without_a_time_doubles_up_to_ten_seconds() -> None:
    busy = NativeBusy(None)
    scene = Scene(WAITING, busy, busy, busy, busy, SERVED, is_healthy=False)
    scene.run()
    assert scene.native.read_at == [0.0, 2.0, 6.0, 14.0, 24.0, 34.0]


def test_an_api_that_is_away_is_asked_until_the_deadline() -> None:
    scene = Scene(NativeUnavailable("gone"), budget=10.0)
    assert scene.fail().kind is WaitFailure.DEADLINE
    assert scene.native.read_at == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert scene.native.cancel_count == 1


def test_the_deadline_tells_what_was_last_seen() -> None:
    scene = Scene(WAITING, budget=25.0)
    failed = scene.fail()
    assert (failed.kind, failed.details.queue_position, failed.details.wait_time) == (
        WaitFailure.DEADLINE,
        1,
        6,
    )
    assert scene.clock.now == 125.0


def test_a_reply_in_the_answer_of_the_cancel_is_delivered() -> None:
    assert Scene(WAITING, budget=5.0, cancelled=SERVED).run() == "Blue."


def test_83_a_fault_ends_the_wait_without_a_cancel() -> None:
    scene = Scene(RUNNING, FAULTED)
    failed = scene.fail()
    assert (failed.kind, failed.details.fault_reason, failed.details.fault_rc) == (
        WaitFailure.FAULTED,
        "r",
        "c",
    )
    assert scene.native.cancel_count == 0


def test_85_a_request_that_is_done_without_a_generation() -> None:
    assert Scene(WAITING | {"done": True}).fail().kind is WaitFailure.NO_GENERATION


@pytest.mark.parametrize(
    ("notice", "kind"),
    [
        (None, WaitFailure.REQUEST_LOST),
        (NoticeKind.FAULTED, WaitFailure.FAULTED),
        (NoticeKind.CANCELLED, WaitFailure.NO_GENERATION),
    ],
)
def test_a_row_that_is_gone_is_explained_by_the_signal(
    notice: NoticeKind | None, kind: WaitFailure
) -> None:
    scene = Scene(WAITING, NativeGone("RequestNotFound"), notices=[(1.0, notice)] if notice else [])
    assert scene.fail().kind is kind
    assert scene.native.cancel_count == 0


def test_78_a_gap_is_refused_at_once_and_cancelled() -> None:
    scene = Scene(GAP)
    failed = scene.fail()
    assert failed.kind is WaitFailure.DECLARATION_GAP
    assert failed.details.impossible_reason == GAP["impossible_reason"]
    assert (scene.native.read_at, scene.native.cancel_count) == ([0.0], 1)


def test_a_gap_beside_a_running_job_is_none() -> None:
    assert Scene(GAP | {"processing": 1}, SERVED).run() == "Blue."


def test_the_grace_is_sixty_seconds_without_a_break() -> None:
    scene = Scene(IMPOSSIBLE)
    assert scene.fail().kind is WaitFailure.NO_WORKER_GRACE
    assert scene.clock.now == 160.0
    assert scene.native.cancel_count == 1


def test_any_other_reading_starts_the_grace_anew() -> None:
    scene = Scene(*[IMPOSSIBLE] * 4, WAITING, IMPOSSIBLE)
    assert scene.fail().kind is WaitFailure.NO_WORKER_GRACE
    assert scene.clock.now == 100.0 + 50.0 + 60.0


def test_a_short_grace_does_not_make_readings_faster_than_once_a_second() -> None:
    scene = Scene(IMPOSSIBLE, grace=0.2)
    assert scene.fail().kind is WaitFailure.NO_WORKER_GRACE
    assert scene.native.read_at == [0.0, 1.0]


def test_82_fail_fast_refuses_at_the_first_reading() -> None:
    assert Scene(IMPOSSIBLE, is_fail_fast=True).fail().kind is WaitFailure.FAIL_FAST_NOBODY
    too_long = Scene(WAITING | {"wait_time": 541}, is_fail_fast=True)
    failed = too_long.fail()
    assert (failed.kind, failed.details.wait_time) == (WaitFailure.FAIL_FAST_WAIT, 541)
    assert too_long.native.cancel_count == 1
    assert (
        Scene(RUNNING | {"wait_time": 541}, is_fail_fast=True).fail().kind
        is WaitFailure.FAIL_FAST_WAIT
    )


def test_fail_fast_is_not_asked_again() -> None:
    assert Scene(WAITING, IMPOSSIBLE, SERVED, is_fail_fast=True).run() == "Blue."
    assert (
        Scene(RUNNING | {"eligible_worker_threads": 0}, SERVED, is_fail_fast=True).run() == "Blue."
    )


@pytest.mark.parametrize("is_fail_fast", [False, True])
def test_fail_fast_gives_up_no_later_than_wait_when_the_workers_leave(is_fail_fast: bool) -> None:
    """They were there at the first reading and went before any of them began."""
    scene = Scene(WAITING, IMPOSSIBLE, is_fail_fast=is_fail_fast)
    assert scene.fail().kind is WaitFailure.NO_WORKER_GRACE
    assert scene.clock.now - 100.0 == 70.0
    back = Scene(WAITING, IMPOSSIBLE, IMPOSSIBLE, WAITING, SERVED, is_fail_fast=is_fail_fast)
    assert back.run() == "Blue."


def test_a_failure_remembers_the_speed_that_was_the_reason() -> None:
    slow = IMPOSSIBLE | {"speed_limit": {"largest_max_length": 120}}
    assert Scene(slow).fail().details.largest_max_length == 120
    assert Scene(slow, IMPOSSIBLE).fail().details.largest_max_length is None
    odd = IMPOSSIBLE | {"speed_limit": {"largest_max_length": "many"}}
    assert Scene(odd).fail().details.largest_max_length is None


def test_a_wait_that_is_aborted_cancels_and_says_why() -> None:
    scene = Scene(WAITING)

    async def play() -> None:
        work = asyncio.create_task(wait_for_reply(scene.wait, scene.subscription))
        await asyncio.sleep(0)
        scene.wait.abort(WaitFailure.SHUTTING_DOWN)
        await work

    with pytest.raises(WaitFailed) as raised:
        asyncio.run(play())
    assert raised.value.kind is WaitFailure.SHUTTING_DOWN
    assert scene.native.cancel_count == 1


def test_a_cancel_is_sent_once_and_its_failure_is_none_of_ours() -> None:
    scene = Scene(WAITING, cancelled=NativeUnavailable("gone"))

    async def play() -> None:
        assert await scene.wait.cancel() is None
        assert await scene.wait.cancel() is None

    asyncio.run(play())
    assert scene.native.cancel_count == 1
