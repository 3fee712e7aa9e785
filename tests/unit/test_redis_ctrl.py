# SPDX-License-Identifier: AGPL-3.0-or-later
import pytest

from horde.redis_ctrl import build_database_url


@pytest.mark.parametrize(
    ("url", "database_url"),
    [
        ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379/7"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/7"),
        (
            "rediss://user:p%2Fw@redis.example:6380/3?ssl_cert_reqs=none",
            "rediss://user:p%2Fw@redis.example:6380/7?ssl_cert_reqs=none",
        ),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=7"),
    ],
)
def test_the_purpose_decides_on_the_database(url: str, database_url: str) -> None:
    assert build_database_url(url, 7) == database_url
