# SPDX-License-Identifier: AGPL-3.0-or-later
import argparse
from pathlib import Path


def run(arguments: argparse.Namespace) -> int:
    return 1


def stop(state: Path) -> int:
    return 1
