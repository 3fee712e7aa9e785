# SPDX-License-Identifier: AGPL-3.0-or-later
"""Addresses that moderators refuse: single ones, networks, and those of workers.

The timeouts live in Redis; without it nobody can be refused, and the moderator is told so.
Source: docs/reference/moderation.md, "Addresses".
"""

from collections.abc import Callable
from ipaddress import ip_address, ip_network

from sqlalchemy.orm import Session

from horde.actions.actors import Actor, By, require_moderator
from horde.actions.acts import record_act
from horde.actions.workers import describe_worker
from horde.database import addresses
from horde.database.addresses import AddressTimeout
from horde.database.workers import require_worker
from horde.db import reading, run_transaction
from horde.exceptions import BadRequest, ServiceUnavailable
from horde.redis_ctrl import RedisUnavailable
from horde.settings import Network
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.operations import (
    AddTimeoutIPInput,
    AddWorkerTimeout,
    DeleteTimeoutIPInput,
    IPTimeout,
)

MINUTES_AN_HOUR = 60
MINUTES_A_DAY = 24 * MINUTES_AN_HOUR


def list_networks(by: By) -> list[IPTimeout]:
    """Every network that is refused."""
    with reading() as session:
        require_moderator(session, by)
    return [_show(timeout) for timeout in _ask(addresses.list_blocked_networks)]


def show_address(by: By, ipaddr: str) -> list[IPTimeout]:
    """The networks that an address belongs to, and its own timeout. Errors: BadRequest."""
    with reading() as session:
        require_moderator(session, by)
    network = _parse_network(ipaddr)
    return [_show(timeout) for timeout in _ask(lambda: addresses.list_timeouts_of(network))]


def refuse_address(by: By, body: AddTimeoutIPInput) -> SimpleResponse:
    """Refuse an address or a network from now on for so many hours. Errors: BadRequest."""
    network = _parse_network(body.ipaddr)

    def work(session: Session) -> None:
        actor = require_moderator(session, by)
        record_act(
            session,
            actor,
            ModeratorAction.ADDRESS_BLOCKED,
            describe_network(network),
            body.reason,
            hours=body.hours,
        )
        # Inside, so that an act is recorded when the timeout stands and not otherwise.
        _ask(lambda: addresses.refuse_network(network, body.hours * MINUTES_AN_HOUR))

    run_transaction(work)
    return SimpleResponse()


def admit_address(by: By, body: DeleteTimeoutIPInput) -> SimpleResponse:
    """Refuse an address or a network no longer; of an address the suspicion is forgotten as well.

    Errors: BadRequest.
    """
    network = _parse_network(body.ipaddr)

    def work(session: Session) -> None:
        actor = require_moderator(session, by)
        record_act(
            session,
            actor,
            ModeratorAction.ADDRESS_UNBLOCKED,
            describe_network(network),
            body.reason,
        )
        _ask(lambda: addresses.admit_network(network))

    run_transaction(work)
    return SimpleResponse()


def refuse_worker_address(by: By, worker_id: str, body: AddWorkerTimeout) -> SimpleResponse:
    """Refuse the address a worker was last seen at, of IPv6 its /64.

    Errors: NotFound, BadRequest.
    """

    def work(session: Session) -> None:
        actor = require_moderator(session, by)
        network = _record_of_worker(
            session,
            actor,
            ModeratorAction.ADDRESS_BLOCKED,
            worker_id,
            body.reason,
            days=body.days,
        )
        _ask(lambda: addresses.refuse_network(network, body.days * MINUTES_A_DAY))

    run_transaction(work)
    return SimpleResponse()


def admit_worker_address(by: By, worker_id: str, reason: str | None = None) -> SimpleResponse:
    """Refuse the address of a worker no longer. Errors: NotFound, BadRequest."""

    def work(session: Session) -> None:
        actor = require_moderator(session, by)
        network = _record_of_worker(
            session, actor, ModeratorAction.ADDRESS_UNBLOCKED, worker_id, reason
        )
        _ask(lambda: addresses.admit_network(network))

    run_transaction(work)
    return SimpleResponse()


def describe_network(network: Network) -> str:
    """The address or network as the subject of an act."""
    is_single = network.prefixlen == network.max_prefixlen
    return f"address {network.network_address if is_single else network}"


def _record_of_worker(
    session: Session,
    actor: Actor,
    action: ModeratorAction,
    worker_id: str,
    reason: str | None,
    **details: object,
) -> Network:
    """Record an act on the address of a worker; the address."""
    worker = require_worker(session, worker_id)
    if not worker.ipaddr:
        raise BadRequest("The worker's address is not known.")
    network = _parse_network(worker.ipaddr)
    record_act(
        session,
        actor,
        action,
        describe_worker(worker.id),
        reason,
        name=worker.name,
        address=describe_network(network),
        **details,
    )
    return network


def _parse_network(text: str) -> Network:
    """An address or a network in CIDR notation; an address is a network of one.

    Errors: BadRequest.
    """
    try:
        if "/" not in text:
            # An IPv4 address in IPv6 clothes is seen as IPv4 everywhere else.
            address = ip_address(text.strip())
            return ip_network(getattr(address, "ipv4_mapped", None) or address)
        return ip_network(text.strip(), strict=False)
    except ValueError:
        raise BadRequest("This is neither an address nor a network.") from None


def _ask[T](work: Callable[[], T]) -> T:
    try:
        return work()
    except RedisUnavailable:
        raise ServiceUnavailable(
            "Timeouts of addresses are kept in Redis, which is away. Try again later."
        ) from None


def _show(timeout: AddressTimeout) -> IPTimeout:
    return IPTimeout(ipaddr=timeout.address, seconds=timeout.seconds)
