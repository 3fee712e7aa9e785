# SPDX-License-Identifier: AGPL-3.0-or-later
"""What of the workers' progress a client sees, and when a stream has to break off."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.oai.mapping import CompletedReply
from horde.oai.relay import Delta, DeltaKind, Relay, RelayBroken, Remainder, Source
from horde.oai.signals import ProgressEntry

MODEL = "a/model"
FIRST, SECOND = "worker 1", "worker 2"


def entry(
    sequence: int, content: str = "", *, generation: str = "a", worker: str = FIRST, **changes: Any
) -> ProgressEntry:
    return ProgressEntry(
        generation, sequence, content, worker_id=worker, **{"model": MODEL} | changes
    )


def second(sequence: int, content: str = "", **changes: Any) -> ProgressEntry:
    return entry(sequence, content, generation="b", worker=SECOND, **changes)


def ended(generation: str = "a") -> ProgressEntry:
    return ProgressEntry(generation, 0, has_ended=True)


def reply(
    content: str | None = "", *, worker: str = FIRST, reasoning: str | None = None
) -> CompletedReply:
    return CompletedReply(
        content=content,
        reasoning=reasoning,
        tool_calls=(),
        finish_reason="stop",
        native_finish_reason=None,
        prompt_tokens=None,
        completion_tokens=None,
        reasoning_tokens=None,
        model=MODEL,
        worker_id=worker,
        worker_name="a worker",
        charge_basis=None,
        queue_wait_seconds=None,
        kudos=1,
        context_adjustments=None,
    )


def make_relay(*, include_reasoning: bool = True, model: str | None = MODEL) -> Relay:
    return Relay(requested_model=model, include_reasoning=include_reasoning)


def join(deltas: list[Delta], kind: DeltaKind = DeltaKind.CONTENT) -> str:
    return "".join(delta.text for delta in deltas if delta.kind is kind)


def relayed(*entries: ProgressEntry, **options: Any) -> Relay:
    relay = make_relay(**options)
    relay.feed(entries)
    return relay


# One attempt


def test_entries_read_in_one_go_share_a_delta() -> None:
    assert make_relay().feed([entry(1, "Blu"), entry(2, "e.")]) == [
        Delta(DeltaKind.CONTENT, "Blue.", Source(FIRST, MODEL))
    ]


def test_the_reasoning_of_an_entry_goes_before_its_content() -> None:
    deltas = make_relay().feed([entry(1, "Blue.", reasoning="Hm."), entry(2, "!", reasoning="So.")])
    assert [(delta.kind.value, delta.text) for delta in deltas] == [
        ("reasoning", "Hm."),
        ("content", "Blue."),
        ("reasoning", "So."),
        ("content", "!"),
    ]


def test_a_repeated_entry_counts_once() -> None:
    relay = relayed(entry(1, "Blue"))
    assert relay.feed([entry(1, "Blue"), entry(2, "."), entry(2, ".")]) == [
        Delta(DeltaKind.CONTENT, ".", Source(FIRST, MODEL))
    ]


def test_text_behind_a_gap_waits_for_the_reply() -> None:
    relay = relayed(entry(1, "One, "))
    assert relay.feed([entry(3, "three"), entry(4, ".")]) == []
    assert relay.finish(reply("One, two, three.")).content == "two, three."


def test_a_generation_whose_start_is_missing_waits_for_the_reply() -> None:
    relay = relayed(entry(7, "three."))
    assert not relay.has_sent
    assert relay.finish(reply("One, two, three.")).content == "One, two, three."


@pytest.mark.parametrize(
    ("final", "rest"),
    [("Blue", ""), ("Blue.", "."), ("Blu", ""), ("", ""), (None, "")],
    ids=["equal", "more", "cut", "none", "null"],
)
def test_the_reply_completes_what_was_sent(final: str | None, rest: str) -> None:
    assert relayed(entry(1, "Blue")).finish(reply(final)).content == rest


@pytest.mark.parametrize("final", ["Red", "blue", "Blu.", "A Blue"])
def test_a_reply_that_contradicts_what_was_sent_breaks_the_stream(final: str) -> None:
    with pytest.raises(RelayBroken) as broken:
        relayed(entry(1, "Blue")).finish(reply(final))
    assert not broken.value.is_restart


def test_a_worker_that_posts_nothing_is_ordinary() -> None:
    relay = make_relay()
    assert relay.finish(reply("Blue.", reasoning="Hm.")) == Remainder(
        reasoning="Hm.", content="Blue."
    )
    assert not relay.has_sent


def test_entries_after_an_end_are_ignored() -> None:
    assert relayed(entry(1, "Blue"), ended()).feed([entry(2, "."), ended()]) == []


def test_late_entries_of_an_attempt_that_was_left_are_ignored() -> None:
    relay = relayed(entry(1, "Blue"), second(1, "Blue"))
    assert relay.feed([entry(2, ", no."), ended("a")]) == []
    assert join(relay.feed([second(2, "!")])) == "!"


# Names


def test_an_entry_without_a_model_stands_for_the_requested_one() -> None:
    assert make_relay().feed([entry(1, "Blue", model=None)])[0].source == Source(FIRST, MODEL)


def test_with_a_list_of_models_text_without_one_waits_for_the_reply() -> None:
    relay = make_relay(model=None)
    assert relay.feed([entry(1, "Blue", model=None)]) == []
    assert relay.feed([entry(2, ".", model=MODEL)]) == []  # it would stand without its start
    assert relay.finish(reply("Blue.")).content == "Blue."


def test_the_first_entry_of_an_attempt_names_the_model_and_the_worker_of_all() -> None:
    relay = make_relay(model=None)
    sources = [
        relay.feed([part])[0].source
        for part in (entry(1, "Blue"), entry(2, " or", model=None), entry(3, ".", worker=""))
    ]
    assert sources == [Source(FIRST, MODEL)] * 3
    relay.feed([ended()])
    assert relay.feed([second(1, "Blue or.", model="b/model"), second(2, " Red")])[
        0
    ].source == Source(SECOND, "b/model")


def test_with_a_list_of_models_text_that_names_its_model_is_sent() -> None:
    assert join(make_relay(model=None).feed([entry(1, "Blue")])) == "Blue"


# Reasoning


def test_hidden_reasoning_is_never_sent() -> None:
    relay = make_relay(include_reasoning=False)
    assert relay.feed([entry(1, reasoning="Hm.")]) == []
    assert not relay.has_sent
    assert relay.finish(reply("Blue.", reasoning="Hm.")) == Remainder(reasoning="", content="Blue.")


def test_the_rest_of_the_reasoning_comes_with_the_reply() -> None:
    assert (
        relayed(entry(1, reasoning="Hm")).finish(reply("", reasoning="Hm, yes.")).reasoning
        == ", yes."
    )


def test_reasoning_that_differs_fails_nothing() -> None:
    relay = relayed(entry(1, "Blue", reasoning="Hm"))
    assert relay.finish(reply("Blue.", reasoning="No")) == Remainder(reasoning="", content=".")


# Another attempt


def test_a_restart_before_any_text_is_invisible() -> None:
    relay = relayed(ended())
    assert join(relay.feed([second(1, "Red.")])) == "Red."
    assert not relay.has_restarted
    assert relay.finish(reply("Red.", worker=SECOND)).content == ""


def test_a_restart_after_hidden_text_is_invisible() -> None:
    relay = relayed(entry(1, reasoning="Hm"), ended(), include_reasoning=False)
    assert join(relay.feed([second(1, "Red.", reasoning="Oh")])) == "Red."
    assert not relay.has_restarted


@pytest.mark.parametrize("marker", [[ended()], []], ids=["ended", "unannounced"])
def test_the_next_attempt_goes_on_where_it_continues_the_text(marker: list[ProgressEntry]) -> None:
    relay = relayed(entry(1, "One, two"), *marker)
    assert relay.feed([second(1, "One"), second(2, ", ")]) == []
    assert relay.feed([second(3, "two, three")]) == [
        Delta(DeltaKind.CONTENT, ", three", Source(SECOND, MODEL))
    ]
    assert relay.finish(reply("One, two, three.", worker=SECOND)).content == "."
    assert relay.has_restarted


@pytest.mark.parametrize(
    "pieces", [["Two"], ["One", ", Two"], ["One, two!"], ["One, two", "", "?"], ["o"]]
)
def test_the_first_differing_character_of_the_next_attempt_breaks_the_stream(
    pieces: list[str],
) -> None:
    relay = relayed(entry(1, "One, two, three"), ended())
    with pytest.raises(RelayBroken) as broken:
        relay.feed([second(number, piece) for number, piece in enumerate(pieces, 1)])
    assert broken.value.is_restart


def test_an_attempt_that_posts_nothing_is_compared_by_its_reply() -> None:
    relay = relayed(entry(1, "One, "), ended())
    assert relay.finish(reply("One, two.", worker=SECOND)).content == "two."


@pytest.mark.parametrize("final", ["One", "", "Two, three."])
@pytest.mark.parametrize("marker", [[ended()], []], ids=["ended", "unannounced"])
def test_its_shorter_or_different_reply_breaks_the_stream(
    marker: list[ProgressEntry], final: str
) -> None:
    relay = relayed(entry(1, "One, "), *marker)
    with pytest.raises(RelayBroken) as broken:
        relay.finish(reply(final, worker=SECOND))
    assert broken.value.is_restart


def test_an_attempt_that_has_caught_up_may_cut_its_text() -> None:
    relay = relayed(entry(1, "One"), ended(), second(1, "One, two.\nUser:"))
    assert relay.finish(reply("One, two.", worker=SECOND)).content == ""


def test_an_attempt_that_has_caught_up_may_diverge() -> None:
    relay = relayed(entry(1, "One"), ended(), second(1, "One, two."))
    with pytest.raises(RelayBroken) as broken:
        relay.finish(reply("Three.", worker=SECOND))
    assert not broken.value.is_restart


def test_new_reasoning_is_sent_where_it_continues_the_old() -> None:
    relay = relayed(entry(1, reasoning="Let me"), ended())
    deltas = relay.feed(
        [second(1, reasoning="Let"), second(2, reasoning=" me think"), second(3, "Blue.")]
    )
    assert [(delta.kind.value, delta.text) for delta in deltas] == [
        ("reasoning", " think"),
        ("content", "Blue."),
    ]


def test_new_reasoning_that_differs_is_left_out_and_content_is_not() -> None:
    relay = relayed(entry(1, reasoning="Let me"), ended())
    deltas = relay.feed([second(1, reasoning="I"), second(2, reasoning=" see"), second(3, "Blue.")])
    assert [(delta.kind.value, delta.text) for delta in deltas] == [("content", "Blue.")]
    assert relay.finish(reply("Blue.", worker=SECOND, reasoning="I see")) == Remainder(
        reasoning="", content=""
    )


# Properties

TEXTS = st.text("ab", max_size=6)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[ProgressEntry], CompletedReply]:
    """Some attempts of workers that may post anything, with repeats and gaps, and the reply of the
    last one.
    """
    entries: list[ProgressEntry] = []
    count = draw(st.integers(1, 3))
    for number in range(count):
        worker = f"worker {draw(st.integers(1, 2))}"
        model = draw(st.sampled_from([MODEL, MODEL, None]))
        for sequence in draw(st.lists(st.integers(1, 5), max_size=6).map(sorted)):
            made = ProgressEntry(
                f"generation {number}", sequence, draw(TEXTS), draw(TEXTS), worker, model
            )
            entries.append(made)
        if number + 1 < count and draw(st.booleans()):
            entries.append(ended(f"generation {number}"))
    reasoning = draw(st.none() | TEXTS)
    return entries, reply(draw(st.none() | TEXTS), worker=worker, reasoning=reasoning)


@given(attempts(), st.booleans(), st.sampled_from([MODEL, None]), st.integers(1, 4))
def test_whatever_is_posted_a_finished_stream_is_the_reply_or_begins_with_it(
    case: tuple[list[ProgressEntry], CompletedReply],
    include_reasoning: bool,
    model: str | None,
    batch: int,
) -> None:
    entries, final = case
    relay = make_relay(include_reasoning=include_reasoning, model=model)
    deltas: list[Delta] = []
    try:
        for start in range(0, len(entries), batch):
            deltas += relay.feed(entries[start : start + batch])
        rest = relay.finish(final)
    except RelayBroken:
        return
    content = join(deltas) + rest.content
    assert content == (final.content or "") or (
        rest.content == "" and content.startswith(final.content or "")
    )
    reasoning = join(deltas, DeltaKind.REASONING)
    assert rest.reasoning in {"", (final.reasoning or "")[len(reasoning) :]}
    assert include_reasoning or reasoning + rest.reasoning == ""
    assert all(delta.text for delta in deltas)
    assert relay.has_sent == bool(deltas)


@st.composite
def honest_attempts(draw: st.DrawFn) -> tuple[list[ProgressEntry], CompletedReply]:
    """Attempts of workers that all write the same text, cut anywhere, each up to anywhere."""
    text, thoughts = draw(st.text(max_size=30)), draw(st.text(max_size=20))
    entries: list[ProgressEntry] = []
    for number in range(draw(st.integers(1, 3))):
        generation, sequence = f"generation {number}", 0
        for kind, whole in (("reasoning", thoughts), ("content", text)):
            stops = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=5)))
            for start, stop in zip([0, *stops], stops, strict=False):
                sequence += 1
                made = ProgressEntry(
                    generation,
                    sequence,
                    worker_id=f"worker {number}",
                    model=MODEL,
                    **{kind: whole[start:stop]},
                )
                entries += [made] * draw(st.integers(1, 2))
        if draw(st.booleans()):
            entries.append(ended(generation))
    return entries, reply(text, worker=f"worker {number}", reasoning=thoughts or None)


@given(honest_attempts(), st.integers(1, 4))
def test_workers_that_write_the_same_text_never_break_a_stream(
    case: tuple[list[ProgressEntry], CompletedReply], batch: int
) -> None:
    entries, final = case
    relay = make_relay()
    deltas = [
        delta
        for start in range(0, len(entries), batch)
        for delta in relay.feed(entries[start : start + batch])
    ]
    rest = relay.finish(final)
    assert join(deltas) + rest.content == final.content
    assert join(deltas, DeltaKind.REASONING) + rest.reasoning == (final.reasoning or "")
