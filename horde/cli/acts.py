# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde acts`: what moderators and operators did, the newest first."""

import argparse

from horde.actions.actors import OPERATOR
from horde.actions.acts import list_acts
from horde.cli._words import Found, add_json_option, run_word, to_facts
from horde.shapes.acts import ActsQuery, ModeratorAction

SHOWN = ("created", "username", "action", "subject", "reason", "details")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--action", choices=[*ModeratorAction])
    parser.add_argument("--subject", metavar="TEXT", help="on what, such as `user 12`")
    parser.add_argument("--page", type=parse_page, default=1, metavar="N", help="50 acts a page")
    add_json_option(parser)


def parse_page(text: str) -> int:
    """A page of the list."""
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError("a number from 1 to 10000")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return run_word("acts", args, lambda: act(args))


def act(args: argparse.Namespace) -> Found:
    """A page of acts."""
    query = ActsQuery(page=args.page, action=args.action, subject=args.subject)
    acts = [to_facts(each) for each in list_acts(OPERATOR, query)]
    return acts if args.json else [{name: each[name] for name in SHOWN} for each in acts]
