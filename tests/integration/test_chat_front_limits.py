# SPDX-License-Identifier: AGPL-3.0-or-later
"""Rate limits of the API through the front. A module of its own: the limiter of a process has one switch."""

from devtools.services import ServiceAddresses
from tests.integration.chat_front import build_body, get_error, run_front_stack


def test_86_too_many_requests_are_429_with_the_time_to_wait(service_urls: ServiceAddresses) -> None:
    with run_front_stack(service_urls, "front_limits", native={"rate_limits_enabled": True}) as limited:
        limited.horde.take_nothing()
        answers = [limited.post(build_body(n=1, horde={"dry_run": True})) for _ in range(8)]
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = get_error(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "metadata" not in error
        assert int(refused.headers["retry-after"]) >= 0
        served = next(answer for answer in answers if answer.status_code == 200)
        assert served.headers["x-ratelimit-limit-requests"].isdigit()
        assert served.headers["x-ratelimit-remaining-requests"].isdigit()
        assert served.headers["x-ratelimit-reset-requests"].endswith("s")
