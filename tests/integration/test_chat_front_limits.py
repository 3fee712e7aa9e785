# SPDX-License-Identifier: AGPL-3.0-or-later
"""Rate limits of the API through the front. A module of its own: the limiter of a process has one
switch.
"""

from dataclasses import replace
from ipaddress import ip_network
from uuid import uuid4

from devtools.services import ServiceAddresses
from horde.classes.base.user import UserRoleTypes
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    build_body,
    build_client,
    get_error,
    run_front,
    run_front_stack,
)
from tests.integration.rows import make_user


def test_86_too_many_requests_are_429_with_the_time_to_wait(service_urls: ServiceAddresses) -> None:
    with run_front_stack(
        service_urls, "front_limits", native={"rate_limits_enabled": True}
    ) as limited:
        limited.horde.take_nothing()
        answers = [limited.post(build_body(n=1, horde={"dry_run": True})) for _ in range(8)]
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = get_error(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "metadata" not in error
        assert int(refused.headers["retry-after"]) >= 0
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-horde-request-id" not in refused.headers
        served = next(answer for answer in answers if answer.status_code == 200)
        assert served.headers["x-ratelimit-limit-requests"].isdigit()
        assert served.headers["x-ratelimit-remaining-requests"].isdigit()
        assert served.headers["x-ratelimit-reset-requests"].endswith("s")


def test_fr_12_users_behind_one_front_with_a_passkey_do_not_limit_each_other(
    service_urls: ServiceAddresses,
) -> None:
    passkey = str(uuid4())
    with run_front_stack(
        service_urls, "front_passkey", native={"rate_limits_enabled": True}, proxy_passkey=passkey
    ) as limited:
        make_user(UserRoleTypes.SERVICE, proxy_passkey=passkey)
        limited.horde.take_nothing()
        trusting = replace(limited.config, trusted_proxies=(ip_network("127.0.0.0/8"),))
        with run_front(trusting) as url, build_client(url) as client:
            calls = []
            for user in range(3):
                _, key = make_user(kudos=1000)
                headers = {
                    "authorization": f"Bearer {key}",
                    "x-forwarded-for": f"198.51.100.{user + 1}",
                }
                body = build_body(horde={"dry_run": True})
                calls += [
                    limited.threads.submit(
                        client.post, "/v1/chat/completions", json=body, headers=headers
                    )
                    for _ in range(2)
                ]
            assert [call.result(PATIENCE_SECONDS).status_code for call in calls] == [200] * 6
