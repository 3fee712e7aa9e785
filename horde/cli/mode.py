# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde mode`: show the switches of the whole horde, or set some."""

import argparse

from horde.actions.actors import OPERATOR
from horde.actions.modes import change_modes, show_modes
from horde.cli._words import Found, add_json_option, add_reason_option, run_word, to_facts
from horde.shapes.modes import HordeModesInput

SWITCHES = {
    "maintenance": "no new requests; what waits is cancelled",
    "invite-only": "new workers need an invitation",
    "raid": "nobody registers; unsafe workers are let in under suspicion",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the switches."""
    for name, effect in SWITCHES.items():
        parser.add_argument(f"--{name}", choices=("on", "off"), help=effect)
    add_reason_option(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return run_word("mode", args, lambda: act(args))


def act(args: argparse.Namespace) -> Found:
    """Set what was given; all switches as they then are."""
    wanted = {
        "maintenance_mode": args.maintenance,
        "invite_only_mode": args.invite_only,
        "raid_mode": args.raid,
    }
    changes = {name: value == "on" for name, value in wanted.items() if value is not None}
    if changes:
        change_modes(OPERATOR, HordeModesInput(**changes, reason=args.reason))
    return to_facts(show_modes(OPERATOR))
