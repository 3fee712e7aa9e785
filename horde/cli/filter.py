# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde filter list|add|change|remove|try`: rules for prompts."""

import argparse
import sys

from horde.actions import filters
from horde.actions.actors import OPERATOR
from horde.cli._words import Found, add_json_option, add_reason_option, run_word, to_facts
from horde.shapes.filters import FiltersQuery, PatchExistingFilter, PutNewFilter, TriedPrompt

LOWEST_TYPE, HIGHEST_TYPE = 10, 29


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="list the rules")
    listing.add_argument("--contains", metavar="TEXT", help="in the expression or the description")
    add = actions.add_parser("add", help="add a rule")
    add.add_argument("regex")
    change = actions.add_parser("change", help="change a rule")
    change.add_argument("id")
    change.add_argument("--regex")
    remove = actions.add_parser("remove", help="delete a rule")
    remove.add_argument("id")
    trial = actions.add_parser("try", help="search the prompt on stdin by the rules")
    for with_type in (listing, change, trial):
        with_type.add_argument("--type", type=parse_type, metavar="N")
    add.add_argument("--type", type=parse_type, metavar="N", required=True)
    for with_texts in (add, change):
        with_texts.add_argument("--replacement", metavar="TEXT", help="what a match becomes")
        with_texts.add_argument("--description", metavar="TEXT")
    add_reason_option(add, change, remove)
    add_json_option(listing, add, change, remove, trial)


def parse_type(text: str) -> int:
    """A type that rules have."""
    if not text.isdecimal() or not LOWEST_TYPE <= int(text) <= HIGHEST_TYPE:
        raise argparse.ArgumentTypeError(f"a number from {LOWEST_TYPE} to {HIGHEST_TYPE}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return run_word("filter", args, lambda: act(args))


def act(args: argparse.Namespace) -> Found:
    """Ask or change the rules."""
    if args.action == "list":
        query = FiltersQuery(filter_type=args.type, contains=args.contains)
        return [to_facts(rule) for rule in filters.list_rules(OPERATOR, query)]
    if args.action == "try":
        tried = TriedPrompt(prompt=sys.stdin.read(), filter_type=args.type)
        return to_facts(filters.try_prompt(OPERATOR, tried))
    if args.action == "remove":
        return to_facts(filters.delete_rule(OPERATOR, args.id, args.reason))
    texts = {
        "regex": args.regex,
        "filter_type": args.type,
        "description": args.description,
        "reason": args.reason,
    }
    if args.action == "add":
        added = PutNewFilter(**texts, replacement=args.replacement or "")
        return to_facts(filters.add_rule(OPERATOR, added))
    changed = PatchExistingFilter(**texts, replacement=args.replacement)
    return to_facts(filters.change_rule(OPERATOR, args.id, changed))
