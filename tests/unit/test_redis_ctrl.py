# SPDX-License-Identifier: AGPL-3.0-or-later
import pytest

from horde.setting_kinds import build_redis_url


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
        ("unix:///run/redis.sock?password=w", "unix:///run/redis.sock?password=w&db=7"),
        ("redis://127.0.0.1:6379?db=3", "redis://127.0.0.1:6379/7"),
    ],
)
def test_the_purpose_decides_on_the_database(url: str, database_url: str) -> None:
    assert build_redis_url(url, 7) == database_url
