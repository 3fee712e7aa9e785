# SPDX-License-Identifier: AGPL-3.0-or-later
import threading

from horde.runtime import Part, Runtime, get_runtime, in_this_runtime

numbers: Part[list[int]] = Part(list)


def test_each_runtime_holds_its_own_part_made_at_first_use() -> None:
    one, two = Runtime(), Runtime()
    with one.entered():
        numbers.get().append(1)
        assert numbers.get() == [1]
        with two.entered():
            assert numbers.get() == []
        assert numbers.get() == [1]
    assert numbers.get() == []
    assert one.list_held(list) == [[1]]


def test_a_part_can_be_replaced() -> None:
    with Runtime().entered():
        numbers.set([7])
        assert numbers.get() == [7]


def test_a_part_that_many_threads_ask_for_is_made_once() -> None:
    made: list[None] = []
    slow = Part(lambda: made.append(None) or object())
    with Runtime().entered():
        threads = [
            threading.Thread(target=in_this_runtime(lambda: found.append(slow.get())))
            for _ in range(16)
        ]
        found: list[object] = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1
    assert len(set(map(id, found))) == 1


def test_a_call_made_elsewhere_finds_the_runtime_it_was_prepared_in() -> None:
    runtime = Runtime()
    with runtime.entered():
        call = in_this_runtime(get_runtime)
    found: list[Runtime] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    assert found == [runtime]
    assert call() is runtime
    assert get_runtime() is not runtime
