# SPDX-License-Identifier: AGPL-3.0-or-later
"""An OpenID Connect provider on loopback: discovery, keys, an authorisation that asks nobody, and
signed tokens.
"""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID, CLIENT_SECRET = "a horde", "a secret / of the + horde"


@dataclass
class Provider:
    """What it is, and how a test wants it to behave."""

    issuer: str
    subject: str = "person 1"
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "one"}))
    signing_key: RSAKey | None = None  # another than the one it publishes
    claims: dict[str, Any] = field(default_factory=dict)
    leaves_out_id_token: bool = False
    is_broken: bool = False
    is_denying: bool = False
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    token_requests: list[dict[str, str]] = field(default_factory=list)

    def build_id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": self.subject,
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
        }
        key = self.signing_key or self.key
        return jwt.encode({"alg": "RS256", "kid": "one"}, claims | self.claims, key)


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    provider: Provider

    def do_GET(self) -> None:
        provider, parts = self.provider, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if provider.is_broken:
            self.answer(500, {"error": "broken"})
        elif parts.path == "/.well-known/openid-configuration":
            self.answer(
                200,
                {
                    "issuer": provider.issuer,
                    "authorization_endpoint": f"{provider.issuer}/authorize",
                    "token_endpoint": f"{provider.issuer}/token",
                    "jwks_uri": f"{provider.issuer}/keys",
                    "response_types_supported": ["code"],
                    "subject_types_supported": ["public"],
                    "id_token_signing_alg_values_supported": ["RS256"],
                },
            )
        elif parts.path == "/keys":
            self.answer(200, {"keys": [provider.key.as_dict(private=False)]})
        elif parts.path == "/authorize":
            code = secrets.token_urlsafe(8)
            provider.codes[code] = query
            told = {"error": "access_denied"} if provider.is_denying else {"code": code}
            self.send_response(302)
            target = urlencode({**told, "state": query["state"]})
            self.send_header("Location", f"{query['redirect_uri']}?{target}")
            self.end_headers()
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        provider = self.provider
        length = int(self.headers["Content-Length"])
        form = {
            name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()
        }
        provider.token_requests.append(form | {"authorization": self.headers["Authorization"]})
        asked = provider.codes.pop(form.get("code", ""), None)
        if provider.is_broken:
            self.answer(500, {"error": "broken"})
        elif asked is None or not is_verified(form, asked):
            self.answer(400, {"error": "invalid_grant"})
        else:
            token = {"access_token": "x", "token_type": "Bearer", "expires_in": 300}
            if not provider.leaves_out_id_token:
                token["id_token"] = provider.build_id_token(asked["nonce"])
            self.answer(200, token)

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def is_verified(form: dict[str, str], asked: dict[str, str]) -> bool:
    """Whether who redeems a code is who asked for it."""
    digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
    challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return challenge == asked["code_challenge"] and form["redirect_uri"] == asked["redirect_uri"]


@contextmanager
def running_provider() -> Iterator[Provider]:
    """A provider that listens on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = Provider(issuer=f"http://127.0.0.1:{server.server_port}")
    Handler.provider = provider
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
