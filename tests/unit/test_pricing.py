# SPDX-License-Identifier: AGPL-3.0-or-later
"""The arithmetic of text kudos as tables of numbers, worked out by hand from the published
formulas.
"""

from decimal import Decimal
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.classes.base.kudos import Account, StatTarget
from horde.classes.kobold.pricing import (
    AllowanceLimits,
    build_activation_movements,
    build_generation_movements,
    build_uptime_movements,
    compute_context_multiplier,
    compute_free_output_allowance,
    compute_generation_charge,
    compute_size_bonus,
    compute_text_kudos,
    compute_text_quote,
    compute_upfront_estimate,
    compute_uptime_reward,
    count_text_tokens,
    estimate_queue_wait_seconds,
    round_quote,
)

LIMITS = AllowanceLimits(
    ceiling_tokens=4096, floor_tokens=512, full_wait_seconds=60, floor_wait_seconds=300
)
CENT = Decimal("0.01")


@pytest.mark.parametrize(
    ("characters", "max_length", "tokens"),
    [
        (0, 512, 20),
        (80, 512, 20),
        (81, 512, 21),
        (400, 512, 100),
        (4000, 512, 512),
        (4000, 16, 16),
        (0, 16, 16),
    ],
)
def test_text_counts_a_quarter_of_its_characters_between_floor_and_cap(
    characters: int, max_length: int, tokens: int
) -> None:
    assert count_text_tokens(characters, max_length) == tokens


@pytest.mark.parametrize(
    ("tokens", "multiplier"),
    [
        (0, 1.2),
        (1, 1.2004),
        (20, 1.2114),
        (512, 1.6545),
        (1024, 2.2),
        (2048, 3.4),
        (4096, 6.04),
        (65536, 30.0),
        (1048576, 30.0),
    ],
)
def test_context_multiplier_grows_with_length_up_to_thirty(tokens: int, multiplier: float) -> None:
    assert compute_context_multiplier(tokens) == pytest.approx(multiplier, abs=1e-4)


@pytest.mark.parametrize(("multiplier", "bonus"), [(1, 1.0), (13, 1.0), (70, 1.4004), (416, 2.0)])
def test_size_bonus_starts_above_thirteen_billion(multiplier: float, bonus: float) -> None:
    assert compute_size_bonus(multiplier) == pytest.approx(bonus, abs=1e-4)


@pytest.mark.parametrize(
    ("reply_tokens", "prompt_tokens", "multiplier", "facts", "kudos"),
    [
        (100, 1024, 13, "known validated", "22.88"),  # 2.2 x 100 x 13 / 125
        (100, 1024, 13, "known", "6.86"),  # ... x 0.3
        # Trust changes nothing on a known model.
        (100, 1024, 7, "known validated trusted", "12.32"),
        (100, 1024, 70, "known validated", "172.52"),  # 2.2 x 100 x 1.40036 x 70 / 125
        (16, 16, 1, "known validated", "0.15"),
        (100, 1024, 1, "trusted", "5.94"),  # 100 x 2.2 x 2.7 / 100
        (100, 1024, 1, "trusted validated", "5.94"),
        (100, 1024, 1, "", "2.20"),
        (4096, 20, 1, "", "1.21"),
        (0, 1024, 13, "known validated", "0.00"),
        (100, 1024, 13, "known validated targeted", "0.10"),
    ],
)
def test_reward_of_a_generation(
    reply_tokens: int, prompt_tokens: int, multiplier: float, facts: str, kudos: str
) -> None:
    words = facts.split()
    reward = compute_text_kudos(
        reply_tokens=reply_tokens,
        prompt_tokens=prompt_tokens,
        multiplier=multiplier,
        is_known="known" in words,
        owner_trusted="trusted" in words,
        validated="validated" in words,
        targeted="targeted" in words,
    )
    assert reward == Decimal(kudos)


@pytest.mark.parametrize(
    ("max_length", "context", "models", "n", "images", "quote"),
    [
        (80, 1024, [(13, True)], 1, 0, "24.88"),  # 80 x 13 x 2.2 / 100 = 22.88, + 1, + 1
        (80, 1024, [(13, True)], 3, 0, "72.64"),
        (80, 1024, [], 1, 0, "24.88"),
        (80, 1024, [(1, False)], 1, 0, "6.75"),  # 80 x 0.027 x 2.2 = 4.752
        (80, 1024, [(1, False), (70, True)], 1, 0, "6.75"),
        (80, 1024, [(13, True), (70, True)], 1, 0, "24.88"),
        (80, 1024, [(13, True)], 1, 2, "34.88"),
    ],
)
def test_quote_reads_the_first_model(
    max_length: int, context: int, models: list[tuple[float, bool]], n: int, images: int, quote: str
) -> None:
    computed = compute_text_quote(
        max_length=max_length, max_context_length=context, models=models, n=n, image_count=images
    )
    assert computed == Decimal(quote)


@pytest.mark.parametrize(
    ("quote", "shown"), [("24.88", 25), ("6.75", 7), ("215.49", 215), ("3.00", 3)]
)
def test_quote_is_shown_as_a_whole_number(quote: str, shown: int) -> None:
    assert round_quote(Decimal(quote)) == shown


@pytest.mark.parametrize(
    ("max_length", "multipliers", "n", "estimate"),
    [
        (512, [], 2, "40"),
        (210, [7], 1, "70"),
        (210, [7, 70], 1, "700"),
        (100, [1], 3, "14.28"),
        (512, [7], 0, "0"),
    ],
)
def test_upfront_estimate_takes_the_dearest_model(
    max_length: int, multipliers: list[float], n: int, estimate: str
) -> None:
    assert compute_upfront_estimate(max_length=max_length, multipliers=multipliers, n=n) == Decimal(
        estimate
    )


@pytest.mark.parametrize(
    ("context", "multiplier", "is_known", "validated", "reward"),
    [
        (2048, 7, True, True, "55"),  # 25 + 15 x 2
        (2048, 7, True, False, "16.5"),
        (2048, 1, True, True, "13.75"),  # a quarter at least
        (2048, 70, True, True, "550"),
        (2048, 1, False, True, "27.5"),
        (1048576, 7, True, True, "3865"),  # capped at 262144 of context
    ],
)
def test_uptime_reward(
    context: int, multiplier: float, is_known: bool, validated: bool, reward: str
) -> None:
    computed = compute_uptime_reward(
        max_context_length=context, multiplier=multiplier, is_known=is_known, validated=validated
    )
    assert computed == Decimal(reward)


@pytest.mark.parametrize(
    ("wait_seconds", "tokens"),
    [(0, 4096), (60, 4096), (61, 4081), (180, 2304), (300, 512), (900, 512), (None, 512)],
)
def test_allowance_falls_in_a_line(wait_seconds: float | None, tokens: int) -> None:
    assert compute_free_output_allowance(wait_seconds, LIMITS) == tokens


def test_allowance_steps_when_the_settings_leave_no_line() -> None:
    step = AllowanceLimits(
        ceiling_tokens=4096, floor_tokens=512, full_wait_seconds=60, floor_wait_seconds=60
    )
    assert [compute_free_output_allowance(wait, step) for wait in (60, 61)] == [4096, 512]


@pytest.mark.parametrize(
    ("tokens", "jobs", "speed", "threads", "running", "wait"),
    [
        (64, 1, 10, 1, 0, 6),  # one unmeasured worker
        (0, 0, 10, 1, 0, 0),
        (1000, 1, 40, 4, 0, 100),  # one job keeps one of four threads busy
        (1000, 9, 40, 4, 0, 25),
        (64, 1, 10, 1, 12.4, 19),
        (500, 3, 0, 0, 0, 500),  # nobody: the divisor is 1
    ],
)
def test_queue_wait(
    tokens: float, jobs: int, speed: float, threads: int, running: float, wait: int
) -> None:
    estimate = estimate_queue_wait_seconds(
        competing_tokens=tokens,
        competing_jobs=jobs,
        tokens_per_second=speed,
        eligible_threads=threads,
        running_seconds=running,
    )
    assert estimate == wait


@given(
    cents=st.integers(min_value=0, max_value=10**9),
    owner_trusted=st.booleans(),
    censored=st.booleans(),
)
def test_generation_pays_the_reward_whole_and_charges_it_with_the_burn(
    cents: int, owner_trusted: bool, censored: bool
) -> None:
    kudos = cents * CENT
    movements = build_generation_movements(
        kudos=kudos,
        max_length=80,
        worker_id=uuid4(),
        owner_id=1,
        owner_trusted=owner_trusted,
        requester_id=2,
        requester_usage_multiplier=1.0,
        reservation_id="upfront:x",
        censored=censored,
    )
    rewards = [currency for currency in movements.currencies if currency.user_id == 1]
    (charge,) = [currency for currency in movements.currencies if currency.user_id == 2]
    escrow = sum(
        (reward.amount for reward in rewards if reward.account is Account.ESCROW), Decimal(0)
    )
    assert sum((reward.amount for reward in rewards), Decimal(0)) == kudos
    assert abs(escrow - (0 if owner_trusted else kudos / 2)) <= CENT / 2
    assert charge.amount == -compute_generation_charge(kudos, censored=censored)
    assert charge.reservation_id == "upfront:x"


def test_generation_books_every_record() -> None:
    worker_id = uuid4()
    movements = build_generation_movements(
        kudos=Decimal("10.01"),
        max_length=80,
        worker_id=worker_id,
        owner_id=1,
        owner_trusted=False,
        requester_id=2,
        requester_usage_multiplier=1.5,
        reservation_id=None,
    )
    booked = {
        (item.user_id or item.worker_id, item.target, item.name): item.amount
        for item in movements.statistics
    }
    assert booked == {
        (1, StatTarget.USER_STATS, "accumulated"): Decimal("5.01"),
        (2, StatTarget.USER_STATS, "accumulated"): Decimal("-11.01"),
        (1, StatTarget.USER_RECORDS, "FULFILLMENT"): 1,
        (1, StatTarget.USER_RECORDS, "CONTRIBUTION"): 80,
        (2, StatTarget.USER_RECORDS, "REQUEST"): 1,
        (2, StatTarget.USER_RECORDS, "USAGE"): 120,
        (worker_id, StatTarget.WORKERS, "kudos"): Decimal("10.01"),
        (worker_id, StatTarget.WORKERS, "contributions"): 80,
        (worker_id, StatTarget.WORKERS, "fulfilments"): 1,
        (worker_id, StatTarget.WORKER_STATS, "generated"): Decimal("10.01"),
    }


def test_activation_burns_the_tax_and_records_a_request_without_usage() -> None:
    movements = build_activation_movements(requester_id=7, tax=Decimal(6))
    assert [(item.user_id, item.amount) for item in movements.currencies] == [(7, Decimal(-6))]
    assert [(item.name, item.amount) for item in movements.statistics] == [
        ("accumulated", -6),
        ("REQUEST", 1),
    ]


@pytest.mark.parametrize(
    ("owner_trusted", "account"), [(True, Account.BALANCE), (False, Account.ESCROW)]
)
def test_uptime_goes_to_one_account(owner_trusted: bool, account: Account) -> None:
    movements = build_uptime_movements(
        kudos=Decimal(55), worker_id=uuid4(), owner_id=3, owner_trusted=owner_trusted
    )
    assert [(item.account, item.amount) for item in movements.currencies] == [
        (account, Decimal(55))
    ]
    assert {item.name for item in movements.statistics} >= {"kudos", "uptime"}
