# SPDX-License-Identifier: AGPL-3.0-or-later
"""Just enough of S3 to see whether a store works: one signed request, without a library.

boto3 spends 0.8 s of processor time before its first request, at each start of the services.

Source: AWS Signature Version 4, header form, path-style addresses.
"""

import hashlib
import hmac
import http.client
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime

REGION = "auto"  # what R2 calls its only region; the embedded store takes any
TIMEOUT_SECONDS = 5


@dataclass(frozen=True)
class Store:
    """Where an object store answers, and its keys."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = REGION

    def send(self, method: str, path: str, body: bytes = b"") -> int:
        """One signed request to ``/bucket/key``. Returns the status; 0 when nothing answers
        properly.
        """
        headers = self.sign(method, path, body, datetime.now(UTC))
        request = urllib.request.Request(
            self.endpoint.rstrip("/") + path, data=body or None, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except (OSError, http.client.HTTPException):
            return 0

    def sign(self, method: str, path: str, body: bytes, now: datetime) -> dict[str, str]:
        """The headers that prove knowledge of the secret key. ``path`` is percent-encoded already
        and has no query.
        """
        body_hash = hashlib.sha256(body).hexdigest()
        time_stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        signed = {
            "host": urllib.parse.urlsplit(self.endpoint).netloc,
            "x-amz-content-sha256": body_hash,
            "x-amz-date": time_stamp,
        }
        names = ";".join(signed)
        lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
        canonical = f"{method}\n{path}\n\n{lines}\n{names}\n{body_hash}"
        scope = f"{day}/{self.region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{time_stamp}\n{scope}\n{digest}"
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
        credential = (
            f"Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return {**signed, "authorization": f"AWS4-HMAC-SHA256 {credential}"}

    def can_write(self, bucket: str) -> bool:
        """Whether a put really arrives; an open port proves little."""
        return self.send("PUT", f"/{bucket}/.probe", b"probe") == 200

    def make_bucket(self, bucket: str) -> bool:
        """Create a bucket unless it exists. Whether it is there afterwards."""
        return self.send("PUT", f"/{bucket}") in (200, 409)
