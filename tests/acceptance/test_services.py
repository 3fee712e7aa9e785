# SPDX-License-Identifier: AGPL-3.0-or-later
"""The embedded services for real: they work, keep their data, end with their launcher, and stand
side by side.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import psycopg2
import pytest
import redis

from devtools.keeper import read_addresses
from devtools.processes import StartFailed, read_start_stamp
from devtools.services import ServiceAddresses, Services

END_SECONDS = 60  # the store takes two; the rest is for a busy machine

# A launcher of its own that can be killed: it says where its services are and waits.
LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from devtools.services import Services
services = Services(Path(sys.argv[1]), {})
services.start()
print(json.dumps(services.launcher.list_process_ids()), flush=True)
time.sleep(600)
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder under a path that only its owner may enter, as pytest's folders are."""
    yield tmp_path / "state"
    Services(tmp_path / "state", {}).remove()


def write_everywhere(addresses: ServiceAddresses, text: str) -> None:
    """Leave a text in all three."""
    with psycopg2.connect(addresses.database_url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE note (text text)")
        cursor.execute("INSERT INTO note VALUES (%s)", [text])
    connection.close()
    with redis.Redis.from_url(addresses.redis_url) as client:
        client.set("note", text)
    connect_store(addresses).put_object(Bucket=addresses.bucket, Key="note", Body=text.encode())


def read_everywhere(addresses: ServiceAddresses) -> list[str]:
    """What the three hold."""
    with psycopg2.connect(addresses.database_url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT text FROM note")
        from_postgres = cursor.fetchall()[0][0]
    connection.close()
    with redis.Redis.from_url(addresses.redis_url, decode_responses=True) as client:
        from_redis = client.get("note")
    from_store = (
        connect_store(addresses)
        .get_object(Bucket=addresses.bucket, Key="note")["Body"]
        .read()
        .decode()
    )
    return [from_postgres, str(from_redis), from_store]


def connect_store(addresses: ServiceAddresses):
    """An S3 client, as the project makes its own."""
    return boto3.client(
        "s3",
        endpoint_url=addresses.s3_endpoint,
        aws_access_key_id=addresses.s3_access_key,
        aws_secret_access_key=addresses.s3_secret_key,
        region_name="auto",
    )


def wait_for_processes_to_end(process_ids: list[int]) -> list[int]:
    """Those that still run after a while."""
    deadline = time.monotonic() + END_SECONDS
    while (
        alive := [pid for pid in process_ids if read_start_stamp(pid) is not None]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def test_data_outlives_a_stop(state: Path) -> None:
    first = Services(state, {})
    write_everywhere(first.start(), "kept")
    process_ids = list(first.launcher.list_process_ids().values())
    first.stop()
    assert wait_for_processes_to_end(process_ids) == []

    second = Services(state, {})
    try:
        assert read_everywhere(second.start()) == ["kept"] * 3
    finally:
        second.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next start ends them")
def test_nothing_outlives_a_killed_launcher(state: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(state)], stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    process_ids = [int(pid) for pid in json.loads(line).values()]
    assert len(process_ids) == 3

    # At once, while the old servers still hold their locks.
    services = Services(state, {})
    try:
        services.start()
        assert wait_for_processes_to_end(process_ids) == []
    finally:
        services.stop()


def test_two_sets_stand_side_by_side(state: Path, service_urls: ServiceAddresses) -> None:
    other = Services(state, {})
    try:
        addresses = other.start()
        write_everywhere(addresses, "other")
        assert (
            addresses.database_url.rpartition("@")[2]
            != service_urls.database_url.rpartition("@")[2]
        )
        with redis.Redis.from_url(service_urls.redis_url) as client:
            assert client.get("note") is None
    finally:
        other.stop()


def test_wrong_passwords_are_refused(service_urls: ServiceAddresses) -> None:
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(service_urls.database_url.replace("horde:", "horde:x", 1))
    with (
        redis.Redis.from_url(
            service_urls.redis_url.replace("redis://:", "redis://:x", 1)
        ) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_addresses_in_the_environment_switch_a_service_off(
    state: Path, service_urls: ServiceAddresses
) -> None:
    services = Services(state, service_urls.build_environment())
    assert services.start() == service_urls
    assert services.launcher.list_process_ids() == {}


def test_a_store_without_its_keys_is_refused(state: Path) -> None:
    with pytest.raises(StartFailed, match="AWS_ACCESS_KEY_ID"):
        Services(
            state, {"DATABASE_URL": "x", "REDIS_URL": "x", "S3_ENDPOINT": "http://127.0.0.1:1"}
        ).start()


def test_a_keeper_ends_with_the_process_it_watches(tmp_path: Path) -> None:
    watched = subprocess.Popen(["sleep", "600"])
    command = [
        sys.executable,
        "-m",
        "devtools.keeper",
        str(tmp_path / "kept"),
        "--watch",
        str(watched.pid),
    ]
    keeper = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while read_addresses(tmp_path / "kept") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(watched.pid, signal.SIGKILL)
        watched.wait()
        assert keeper.wait(END_SECONDS) == 0
        assert not (tmp_path / "kept").exists()
    finally:
        watched.kill()
        keeper.terminate()
        keeper.wait()
