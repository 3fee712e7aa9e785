# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who an address stands for: how limits, timeouts and suspicion count by address."""

from functools import lru_cache
from ipaddress import ip_address, ip_network

IPV6_SUBJECT_PREFIX = 64  # a household gets a /64, so its single addresses are no limit at all


@lru_cache(maxsize=4096)
def build_ip_subject(address: str) -> str:
    """An IPv4 address, the /64 of an IPv6 address, or the text as it is when it is no address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return (
        str(parsed)
        if parsed.version == 4
        else str(ip_network((parsed, IPV6_SUBJECT_PREFIX), strict=False))
    )
