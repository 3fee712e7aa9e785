# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde block list|show|add|remove`: refuse addresses and networks."""

import argparse

from horde.actions import addresses
from horde.actions.actors import OPERATOR
from horde.cli._words import Found, add_json_option, add_reason_option, run_word, to_facts
from horde.shapes.operations import (
    MAX_TIMEOUT_HOURS,
    AddTimeoutIPInput,
    DeleteTimeoutIPInput,
    IPTimeout,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="list the networks that are refused")
    show = actions.add_parser("show", help="show what refuses an address")
    add = actions.add_parser("add", help="refuse an address or a network such as 198.51.100.0/24")
    remove = actions.add_parser("remove", help="refuse it no longer")
    for parser_of_one in (show, add, remove):
        parser_of_one.add_argument("address")
    add.add_argument(
        "--hours", type=parse_hours, default=24, metavar="N", help="for so long (%(default)s)"
    )
    add_reason_option(add, remove)
    add_json_option(listing, show, add, remove)


def parse_hours(text: str) -> int:
    """A number of hours within what a timeout may last."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TIMEOUT_HOURS:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MAX_TIMEOUT_HOURS}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return run_word("block", args, lambda: act(args))


def act(args: argparse.Namespace) -> Found:
    """Ask or change the timeouts."""
    if args.action == "list":
        return [to_facts(timeout) for timeout in addresses.list_networks(OPERATOR)]
    if args.action == "add":
        body = AddTimeoutIPInput(ipaddr=args.address, hours=args.hours, reason=args.reason)
        addresses.refuse_address(OPERATOR, body)
    if args.action == "remove":
        addresses.admit_address(
            OPERATOR, DeleteTimeoutIPInput(ipaddr=args.address, reason=args.reason)
        )
    timeouts: list[IPTimeout] = addresses.show_address(OPERATOR, args.address)
    return [to_facts(timeout) for timeout in timeouts]
