# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the embedded services are told, and the parts of the launcher that need no service."""

import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from devtools import postgres, processes, state
from devtools.launcher import Launcher
from devtools.processes import Child, StartFailed
from devtools.s3 import Store
from devtools.services import ServiceAddresses
from devtools.store import ADMIN_GRPC_OFFSET, PARTS, build_weed_command, find_store_ports
from devtools.valkey import Valkey

HTTP_PORTS = {part: 12000 + number for number, part in enumerate(PARTS)}
GRPC_PORTS = {part: 13000 + number for number, part in enumerate(PARTS)}


def test_the_store_sends_no_telemetry_and_listens_on_loopback_only() -> None:
    command = build_weed_command(Path("/data"), HTTP_PORTS, GRPC_PORTS)
    assert {"-master.telemetry=false", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"} <= set(command)


@pytest.mark.parametrize("part", PARTS)
def test_every_port_of_the_store_is_named(part: str) -> None:
    command = build_weed_command(Path("/data"), HTTP_PORTS, GRPC_PORTS)
    assert f"-{part}.port={HTTP_PORTS[part]}" in command
    assert f"-{part}.port.grpc={GRPC_PORTS[part]}" in command


def test_the_worker_of_the_store_finds_the_admin_part() -> None:
    ports = find_store_ports()
    assert len(set(ports)) == len(ports) == 2 * len(PARTS)
    assert (
        ports[-1]
        == ports[PARTS.index("admin")] + ADMIN_GRPC_OFFSET
        < processes.EPHEMERAL_PORTS_START
    )


@pytest.mark.parametrize(("durable", "line"), [(True, "appendonly yes"), (False, "appendonly no")])
def test_redis_keeps_its_data_only_when_asked(tmp_path: Path, durable: bool, line: str) -> None:
    settings = Valkey(tmp_path, password="secret", durable=durable).build_settings().splitlines()
    assert {line, "bind 127.0.0.1", "requirepass secret"} <= set(settings)


def test_ports_are_below_those_the_kernel_lends() -> None:
    ports = processes.find_free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < processes.EPHEMERAL_PORTS_START


def test_a_request_is_signed_as_aws_signs_it() -> None:
    # The key, secret and time of AWS' own examples; the signature was computed with botocore
    # 1.44.8.
    store = Store(
        "http://127.0.0.1:8333", "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    )
    headers = store.sign("PUT", "/bucket/key", b"hello", datetime(2015, 8, 30, 12, 36, tzinfo=UTC))
    assert (
        headers["authorization"]
        == "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/auto/s3/aws4_request, "
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
        "Signature=4ea70fb374dc9dbc158e201f9f9394b5a68124edbd85d4ecaebfac86b0e0e287"
    )


def test_the_settings_of_an_application_are_complete() -> None:
    addresses = ServiceAddresses(
        "postgresql://d", "redis://r", "http://s", "key", "secret", "bucket"
    )
    assert addresses.build_environment() == {
        "DATABASE_URL": "postgresql://d",
        "REDIS_URL": "redis://r",
        "S3_ENDPOINT": "http://s",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "R2_SOURCE_IMAGE_BUCKET": "bucket",
    }


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    first = state.load_secrets(tmp_path)
    assert state.load_secrets(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600
    assert len(set(first.values())) == len(first)


def test_a_folder_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartFailed, match="not a folder of our own"):
        postgres.check_root_folder(tmp_path)


def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StartFailed, match="not a folder of our own"):
        postgres.check_root_folder(tmp_path / "link")


def test_a_program_that_is_missing_is_reported_with_its_log(tmp_path: Path) -> None:
    child = Child("ghost", ["/no/such/program"], tmp_path / "ghost.log")
    child.start()
    with pytest.raises(
        StartFailed, match=r"ghost ended with 127\n  /no/such/program: No such file or directory"
    ):
        child.wait_until(lambda _: False, 10)


def test_a_silent_program_is_reported(tmp_path: Path) -> None:
    child = Child("mute", ["/bin/sleep", "60"], tmp_path / "mute.log")
    child.start()
    try:
        with pytest.raises(StartFailed, match="mute did not answer within 0 s"):
            child.wait_until(lambda _: False, 0)
    finally:
        child.stop()


def test_a_child_can_be_interrupted_though_its_launcher_ignores_that(tmp_path: Path) -> None:
    script = (
        "import signal; from pathlib import Path; from devtools.processes import"
        " Child\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild = Child('c', ['/bin/sleep',"
        f" '60'], Path({str(tmp_path / 'log')!r})); child.start()\nimport time; time.sleep(0.5);"
        " child.stop(5); print(child.process.returncode)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert answer.stdout.strip() == "-15"


def test_processes_of_a_killed_launcher_are_waited_for_by_id_and_start(tmp_path: Path) -> None:
    # Our own id with another start time: that process is gone, and nobody is signalled.
    record = tmp_path / "children.json"
    record.write_text(json.dumps({str(os.getpid()): "another start"}))
    Launcher(record).wait_for_leftovers()
