# SPDX-License-Identifier: AGPL-3.0-or-later
"""The object store: put, get, sign and delete by key. Any S3 server, Cloudflare R2 in production.

Row first, object second; the row goes first too, then the object. A key names its bucket by its
ending, so that a key that waits for its deletion needs nothing beside it. Callers see plain values
and `StoreUnavailable`; no exception of the driver leaves this module. Never call anything but
`sign_download_url` inside a transaction.

A store that hangs would hold every caller for as long as the first. So after a failure it is left
alone for a while: calls fail at once, and of those that come later one at a time tries.
"""

import base64
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError

from horde import metrics, tally
from horde.chat.stored_objects import CHAT_MESSAGES_SUFFIX
from horde.circuit_breaker import CircuitBreaker
from horde.config import Config
from horde.logger import get_logger
from horde.runtime import Part

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

logger = get_logger(__name__)

JPEG_TYPE = "image/jpeg"
EVIDENCE_SUFFIX = "_evidence.json"

CONNECT_SECONDS = 2.0
# Of silence, not of the whole answer: a put is answered when the store has written 36 MiB.
READ_SECONDS = 10.0
ATTEMPTS = 2  # one retry: a kept connection that the store closed is the usual failure
RETRY_AFTER_SECONDS = 5.0  # how long a failing store is left alone; then one call tries it
# More than such a call takes: two attempts, each with its time to connect and to wait.
TRIAL_SECONDS = 30.0
# The periodic jobs' threads, beside one connection for each request thread.
BACKGROUND_CONNECTION_COUNT = 4
MAX_KEYS_A_DELETE = 1000  # what DeleteObjects takes
MISSING_CODES = frozenset({"NoSuchKey", "404"})
MISSING_BUCKET_CODE = "NoSuchBucket"


class StoreUnavailable(Exception):
    """The store did not do what was asked: away, refusing, or not configured."""


class StoreCircuitOpen(StoreUnavailable):
    """The store was not asked, since it has just failed: whatever was to be stored is not."""


class ObjectMissing(StoreUnavailable):
    """The store answered, and there is no such object."""


@dataclass(slots=True)
class StoreState:
    """What `connect` noted for this runtime; clients are made on first use, after the fork."""

    config: Config | None = None
    client: "S3Client | None" = None
    signer: "S3Client | None" = None
    breaker: CircuitBreaker = field(
        default_factory=lambda: CircuitBreaker(RETRY_AFTER_SECONDS, trial_seconds=TRIAL_SECONDS)
    )
    lock: threading.Lock = field(default_factory=threading.Lock)


state = Part(StoreState)


def connect(config: Config) -> None:
    """Note where the store is; nothing is asked before the first use."""
    disconnect()
    state.set(StoreState(config))


def disconnect() -> None:
    """Close the kept connections, as at shutdown."""
    held = state.get()
    state.set(StoreState())
    for client in (held.client, held.signer):
        if client is not None:
            client.close()


def is_configured() -> bool:
    """Whether there is a store at all; without one chat has no images and nothing is offloaded."""
    return bool(_require_config().s3_endpoint)


def is_circuit_open() -> bool:
    """Whether a call would fail at once, since the store just failed; signing needs no store."""
    return state.get().breaker.is_open()


def get_bucket(key: str) -> str:
    """The bucket an object lies in, by its key's ending."""
    config = _require_config()
    if key.endswith(EVIDENCE_SUFFIX):
        return config.evidence_bucket
    return (
        config.chat_messages_bucket
        if key.endswith(CHAT_MESSAGES_SUFFIX)
        else config.source_image_bucket
    )


def list_buckets() -> list[str]:
    """Every bucket of the settings."""
    config = _require_config()
    return sorted({config.source_image_bucket, config.chat_messages_bucket, config.evidence_bucket})


def put_object(
    key: str,
    body: bytes | bytearray,
    *,
    content_type: str,
    content_encoding: str | None = None,
    cache_control: str | None = None,
) -> None:
    """Store an object, over whatever was there. Raises StoreUnavailable; then it may be stored or
    not.
    """
    headers = {"ContentEncoding": content_encoding, "CacheControl": cache_control}
    extra: dict[str, Any] = {name: value for name, value in headers.items() if value is not None}
    with _calling("put"):
        _get_client().put_object(
            Bucket=get_bucket(key), Key=key, Body=body, ContentType=content_type, **extra
        )


def upload_source_image(key: str, jpeg: bytes) -> None:
    """Store an image of a request. Raises StoreUnavailable."""
    put_object(key, jpeg, content_type=JPEG_TYPE)


def upload_chat_messages(key: str, body: bytes | bytearray, *, is_gzipped: bool) -> None:
    """Store the messages of a request as one JSON document. Raises StoreUnavailable.

    `no-transform` keeps a store from unpacking what it was given packed, whatever a client says it
    accepts.
    """
    put_object(
        key,
        body,
        content_type="application/json",
        content_encoding="gzip" if is_gzipped else None,
        cache_control="no-transform",
    )


def upload_evidence(key: str, body: bytes) -> None:
    """Store the text of evidence as a JSON document, which is for the horde alone. Raises
    StoreUnavailable.
    """
    put_object(key, body, content_type="application/json", cache_control="private, no-store")


def get_object(key: str) -> bytes:
    """The bytes of an object as stored. Raises ObjectMissing, else StoreUnavailable."""
    with _calling("get"):
        body: bytes = _get_client().get_object(Bucket=get_bucket(key), Key=key)["Body"].read()
        return body


def has_object(key: str) -> bool:
    """Whether there is such an object. Raises StoreUnavailable."""
    try:
        with _calling("head"):
            _get_client().head_object(Bucket=get_bucket(key), Key=key)
    except ObjectMissing:
        return False
    return True


def sign_download_url(key: str, lifetime_seconds: int) -> str:
    """A URL that anybody may read the object by for `lifetime_seconds`; made here, without asking
    the store.

    Raises StoreUnavailable without a configured store.
    """
    with _translating("sign"):
        parameters = {"Bucket": get_bucket(key), "Key": key}
        return _get_signer().generate_presigned_url(
            "get_object", Params=parameters, ExpiresIn=lifetime_seconds
        )


def delete_objects(keys: Sequence[str]) -> list[str]:
    """Delete objects; a missing one counts as deleted. Returns the keys the store did not delete,
    and raises nothing.
    """
    failed: list[str] = []
    for bucket, bucket_keys in _group_by_bucket(keys).items():
        for start in range(0, len(bucket_keys), MAX_KEYS_A_DELETE):
            failed.extend(_delete_batch(bucket, bucket_keys[start : start + MAX_KEYS_A_DELETE]))
    return failed


def check_buckets() -> None:
    """Raise StoreUnavailable unless every bucket of the settings is there and may be read."""
    for bucket in list_buckets():
        with _calling("list"):
            _get_client().list_objects_v2(Bucket=bucket, MaxKeys=1)


def list_objects() -> Iterator[tuple[str, str]]:
    """Every stored object as (bucket, key), a page at a time: for an audit, never for a request.
    Raises StoreUnavailable.

    A bucket that was not made yet holds nothing: stores make it with the first object.
    """
    for bucket in list_buckets():
        token: dict[str, Any] = {}
        while True:
            try:
                with _calling("list"):
                    page = _get_client().list_objects_v2(Bucket=bucket, **token)
            except StoreUnavailable as unavailable:
                if _get_error_code(unavailable.__cause__) == MISSING_BUCKET_CODE:
                    break
                raise
            for entry in page.get("Contents", []):
                yield bucket, entry["Key"]
            if not page["IsTruncated"]:
                break
            token = {"ContinuationToken": page["NextContinuationToken"]}


def _delete_batch(bucket: str, keys: Sequence[str]) -> list[str]:
    try:
        with _calling("delete"):
            answer = _get_client().delete_objects(
                Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
    except StoreUnavailable:
        return list(keys)
    errors = [error for error in answer.get("Errors", []) if error.get("Code") not in MISSING_CODES]
    if errors:
        _count_failures("delete", "refused", len(errors))
        logger.warning(
            "horde.store.failed", extra={"operation": "delete", "error_code": errors[0].get("Code")}
        )
    return [error["Key"] for error in errors if "Key" in error]


def _group_by_bucket(keys: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        groups.setdefault(get_bucket(key), []).append(key)
    return groups


@contextmanager
def _calling(operation: str) -> Iterator[None]:
    """A call that the store has to answer. Raises ObjectMissing, StoreUnavailable; at once while
    the store is left alone.
    """
    breaker = state.get().breaker
    if not breaker.admits():
        _count_failures(operation, "skipped")
        raise StoreCircuitOpen("The circuit breaker of the store is open after a failure.")
    try:
        with _translating(operation):
            yield
    except ObjectMissing:
        breaker.record_success()
        raise
    except StoreUnavailable as unavailable:
        if _is_trouble(unavailable.__cause__):
            breaker.record_failure()
        else:
            breaker.record_success()
        raise
    breaker.record_success()


def _is_trouble(error: BaseException | None) -> bool:
    """Whether the next call would fare no better: no answer, or one that tells of the store and not
    of what was asked.
    """
    if isinstance(error, ClientError):
        return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500)
    return isinstance(error, BotoCoreError)


@contextmanager
def _translating(operation: str) -> Iterator[None]:
    """Time a call and turn the driver's errors into ours; neither message nor log quotes what was
    stored.
    """
    started_at = time.monotonic()
    try:
        yield
    except ClientError as error:
        code = _get_error_code(error)
        if code in MISSING_CODES:
            raise ObjectMissing("The store has no such object.") from error
        _note_failure(operation, "refused", error_code=code)
        raise StoreUnavailable("The store refused.") from error
    except (BotoCoreError, OSError, ValueError) as error:
        _note_failure(operation, "failed", error_code=type(error).__name__)
        raise StoreUnavailable("The store cannot be reached.") from error
    finally:
        metrics.store_seconds.record(time.monotonic() - started_at, {"horde.operation": operation})


def _get_error_code(error: BaseException | None) -> str:
    """What the store called its refusal."""
    if not isinstance(error, ClientError):
        return "unknown"
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _note_failure(operation: str, outcome: str, *, error_code: str) -> None:
    _count_failures(operation, outcome)
    logger.warning("horde.store.failed", extra={"operation": operation, "error_code": error_code})


def _count_failures(operation: str, outcome: str, count: int = 1) -> None:
    tally.count(tally.STORE_FAILED, count)
    metrics.store_failures.add(count, {"horde.operation": operation, "horde.outcome": outcome})


def _require_config() -> Config:
    config = state.get().config
    if config is None:
        raise RuntimeError("The store is not connected: call r2.connect(config) first.")
    return config


def _get_client() -> "S3Client":
    config, held = _require_config(), state.get()
    with held.lock:
        if held.client is None:
            held.client = _build_client(config, config.s3_endpoint)
        return held.client


def _get_signer() -> "S3Client":
    """A client for signing alone: the host is part of a signature, and workers may know the store
    by another name.
    """
    config, held = _require_config(), state.get()
    if not config.s3_public_endpoint or config.s3_public_endpoint == config.s3_endpoint:
        return _get_client()
    with held.lock:
        if held.signer is None:
            held.signer = _build_client(config, config.s3_public_endpoint)
        return held.signer


def _build_client(config: Config, endpoint: str) -> "S3Client":
    """A client that fails fast and reads no setting but ours: neither proxies nor credential chains
    of the environment.
    """
    if not config.s3_endpoint:
        raise StoreUnavailable("No object store is configured.")
    settings = ClientConfig(
        signature_version="s3v4",
        s3={"addressing_style": "path"},
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=config.server_threads + BACKGROUND_CONNECTION_COUNT,
        # R2 refuses the checksum trailers that the library adds to every put, and cannot answer
        # with checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={},
        tcp_keepalive=True,
    )
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=config.s3_access_key,
        aws_secret_access_key=config.s3_secret_key,
        region_name=config.s3_region,
        config=settings,
    )
    client.meta.events.register("before-call.s3.DeleteObjects", _add_content_md5)
    return client


def _add_content_md5(params: Mapping[str, Any], **_: object) -> None:
    """A bulk delete has to carry a checksum, and this one every S3 server knows; the library's own
    CRC32 some refuse.
    """
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
