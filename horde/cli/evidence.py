# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde evidence list|show|note`: prompts that were refused or reported."""

import argparse

from horde.actions import evidence
from horde.actions.actors import OPERATOR
from horde.cli._words import Found, add_json_option, run_word, to_facts
from horde.shapes.evidence import EvidenceNoteInput, EvidenceQuery

SHOWN = ("id", "created", "reason", "user_id", "text", "prompts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="list prompts, the newest first")
    listing.add_argument("--user", metavar="NUMBER", help="of this account")
    listing.add_argument("--address", metavar="ADDRESS", help="from this address")
    listing.add_argument("--worker", metavar="ID", help="what this worker reported")
    listing.add_argument("--since", metavar="MOMENT", help="such as 2026-01-31T12:00:00Z")
    listing.add_argument("--until", metavar="MOMENT")
    listing.add_argument("--limit", metavar="N", help="1 to 100, 50 unless told otherwise")
    listing.add_argument("--before", metavar="ID", help="older than this one")
    show = actions.add_parser("show", help="show one with all of its text and notes")
    note = actions.add_parser("note", help="note something on one")
    for single in (show, note):
        single.add_argument("id")
    note.add_argument("text", metavar="TEXT")
    add_json_option(listing, show, note)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    # Events of an address are found by a hash of it, which the secret is part of.
    return run_word("evidence", args, lambda: act(args), uses_keys=True)


def act(args: argparse.Namespace) -> Found:
    """Read the evidence, or add to it."""
    if args.action == "note":
        body = EvidenceNoteInput(note=args.text)
        return to_facts(evidence.add_note(OPERATOR, args.id, body))
    if args.action == "show":
        return to_facts(evidence.show_event(OPERATOR, args.id))
    query = EvidenceQuery(
        user_id=args.user,
        ipaddr=args.address,
        worker_id=args.worker,
        since=args.since,
        until=args.until,
        limit=args.limit,
        before_id=args.before,
    )
    events = [to_facts(event) for event in evidence.list_evidence(OPERATOR, query)]
    return events if args.json else [{name: event[name] for name in SHOWN} for event in events]
