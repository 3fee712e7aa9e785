# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who calls: the key, the agent, the address, and the key of the operation. Pure: headers in,
values out.

Source: docs/reference/chat_front.md, "Keys", "Calls to the native API" and "Operation key".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from uuid import UUID, uuid4, uuid5

from starlette.datastructures import Headers

from horde.oai.errors import RequestRefused
from horde.oai.native import Caller
from horde.settings import Network

# Fixed for ever: the same Idempotency-Key has to name the same operation after a restart and on
# every front.
IDEMPOTENCY_NAMESPACE: Final = UUID("b3d5a0c2-6f0e-4d6b-9a43-2f8f1c7e5d10")
MAX_IDEMPOTENCY_KEY_CHARACTERS: Final = 255
MAX_CLIENT_REQUEST_ID_CHARACTERS: Final = 512
MISSING_KEY_MESSAGE: Final = (
    "You didn't provide an API key. Send your horde key as 'Authorization: Bearer <key>', "
    "or 0000000000 to use the horde anonymously."
)


@dataclass(frozen=True, slots=True)
class OperationKey:
    """What makes repeating a submit harmless. A key the client chose lets it come back for the
    reply.
    """

    value: UUID
    is_from_client: bool


def require_api_key(headers: Headers) -> str:
    """The bearer key, else that of a client of Anthropic's API, else that of a native one. Raises
    RequestRefused (401).
    """
    # A tab may stand between the two as well.
    words = headers.get("authorization", "").split(maxsplit=1)
    key = words[1].strip() if len(words) == 2 and words[0].lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    if "authorization" not in headers:
        key = key or headers.get("apikey", "").strip()
    if not key:
        raise RequestRefused("missing_api_key", MISSING_KEY_MESSAGE, status=401)
    if not key.isprintable():
        raise RequestRefused(
            "invalid_api_key", "The API key holds characters that no key has.", status=401
        )
    return key


def build_caller(
    api_key: str, headers: Headers, peer: str | None, trusted_proxies: Sequence[Network]
) -> Caller:
    """On whose behalf the native API is called."""
    agent = headers.get("client-agent", "").strip()
    return Caller(
        api_key=api_key,
        client_agent=agent if agent.isprintable() else None,
        address=find_client_address(peer, headers.getlist("x-forwarded-for"), trusted_proxies),
    )


def find_client_address(
    peer: str | None, forwarded: Sequence[str], trusted_proxies: Sequence[Network]
) -> str | None:
    """The peer, or for a trusted proxy the right-most forwarded address that is none itself."""
    if peer is None or not _is_trusted(peer, trusted_proxies):
        return peer
    for hop in reversed(",".join(forwarded).split(",")):
        address = hop.strip()
        if not _is_address(address):
            break  # whoever wrote this is not to be believed about what stands before it
        if not _is_trusted(address, trusted_proxies):
            return address
    return peer


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_trusted(text: str, trusted_proxies: Sequence[Network]) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any(
        address in network or (mapped is not None and mapped in network)
        for network in trusted_proxies
    )


def choose_operation_key(in_body: UUID | None, headers: Headers) -> OperationKey:
    """The client's key of the body or of `Idempotency-Key`, else a fresh one."""
    if in_body is not None:
        return OperationKey(in_body, is_from_client=True)
    text = headers.get("idempotency-key", "").strip()
    if not 1 <= len(text) <= MAX_IDEMPOTENCY_KEY_CHARACTERS:
        return OperationKey(uuid4(), is_from_client=False)
    try:
        return OperationKey(UUID(text), is_from_client=True)
    except ValueError:
        return OperationKey(uuid5(IDEMPOTENCY_NAMESPACE, text), is_from_client=True)


def find_client_request_id(headers: Headers) -> str | None:
    """The client's own name of the request, for the log; None when it has none that fits."""
    text = headers.get("x-client-request-id", "")
    is_usable = (
        text.isascii() and text.isprintable() and 1 <= len(text) <= MAX_CLIENT_REQUEST_ID_CHARACTERS
    )
    return text if is_usable else None
