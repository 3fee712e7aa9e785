# SPDX-License-Identifier: AGPL-3.0-or-later
import pytest

from horde.classes.kobold.speed_limits import is_unreasonably_fast


@pytest.mark.parametrize(
    ("model", "multiplier", "is_known", "owner_trusted", "limit"),
    [
        ("large", 70, True, False, 30),
        ("large", 69.9, True, False, 100),
        ("middle", 14, True, False, 100),
        ("small", 13.9, True, False, 150),
        ("tiny", 1, True, False, 150),
        ("8x70B", 70, True, False, 90),
        ("Mixtral-8X22B", 141, True, False, 90),
        ("8x7B", 46, True, False, 150),  # three times 100 is over what anything may write
        ("large", 70, False, False, 150),
        ("large", 70, True, True, 150),
    ],
)
def test_a_model_can_write_only_so_fast(
    model: str, multiplier: float, is_known: bool, owner_trusted: bool, limit: float
) -> None:
    def judge(tokens: int) -> bool:
        return is_unreasonably_fast(
            generated_tokens=tokens,
            seconds=10.0,
            model=model,
            multiplier=multiplier,
            is_known=is_known,
            owner_trusted=owner_trusted,
        )

    assert not judge(int(limit * 10))
    assert judge(int(limit * 10) + 1)


@pytest.mark.parametrize(("tokens", "is_judged"), [(0, False), (49, False), (50, True)])
def test_a_short_reply_is_not_judged(tokens: int, is_judged: bool) -> None:
    for seconds in (0.0, -1.0):
        assert (
            is_unreasonably_fast(
                generated_tokens=tokens,
                seconds=seconds,
                model="m",
                multiplier=1,
                is_known=False,
                owner_trusted=True,
            )
            is is_judged
        )
