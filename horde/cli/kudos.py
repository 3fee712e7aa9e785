# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde kudos audit|move`: prove the balances, and give kudos of one account to another."""

import argparse
import json
from dataclasses import asdict

from horde import db
from horde.actions.kudos import move_kudos
from horde.cli._operating import run_on_database
from horde.cli._words import Found, add_json_option, add_reason_option, run_word, to_facts
from horde.config import Config
from horde.database.kudos import audit_ledger, fold_postings
from horde.shapes.kudos import KudosTransferInput
from horde.shapes.users import MAX_ADJUSTMENT

EXIT_DISCREPANCIES = 1
EXIT_REFUSED = 2  # the audit did not run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser(
        "audit",
        help="prove the balances; exit code 1 when something does not add up. Changes nothing",
    )
    move = actions.add_parser("move", help="give kudos of one account to another")
    move.add_argument("giver", help="an alias, name#id")
    move.add_argument("receiver", help="an alias, or the id of a shared key")
    move.add_argument("amount", type=parse_amount)
    add_reason_option(move)
    add_json_option(move)


def parse_amount(text: str) -> int:
    """Whole kudos within what one gift may move."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ADJUSTMENT:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to {MAX_ADJUSTMENT}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    if args.action == "move":
        return run_word("kudos", args, lambda: move(args))
    return run_on_database("kudos", audit, refused_code=EXIT_REFUSED)


def move(args: argparse.Namespace) -> Found:
    """Give kudos, and fold them at once: there may be no server to do it."""
    body = KudosTransferInput(username=args.receiver, amount=args.amount)
    moved = to_facts(move_kudos(args.giver, body, args.reason))
    fold_postings()
    return moved


def audit(_config: Config) -> int:
    """Replay the ledger in one transaction."""
    with db.transaction() as session:
        report = audit_ledger(session)
    print(json.dumps(asdict(report), indent=2))
    return EXIT_DISCREPANCIES if report.discrepancies else 0
