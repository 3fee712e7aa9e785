# SPDX-License-Identifier: AGPL-3.0-or-later
"""What every response has in common: CORS, the node's name, the charset, and the fields a client
asked for.
"""

import socket
from collections.abc import Callable, Mapping

from flask import Flask, Response, g, make_response, request
from flask_restx import Api
from flask_restx.mask import Mask, MaskError

from horde.config import VERSION, Config
from horde.exceptions import BadRequest
from horde.json_text import read_json, write_document, write_json
from horde.written_answer import WrittenAnswer

JSON_TYPE = "application/json"
PRIVATE = {"Cache-Control": "private, no-store"}
"""Headers of an answer that only its asker may keep."""
ALLOWED_METHODS = "POST, GET, OPTIONS, PUT, DELETE, PATCH"
ALLOWED_HEADERS = ", ".join(
    [
        "Accept",
        "Content-Type",
        "Content-Length",
        "Accept-Encoding",
        "X-CSRF-Token",
        "apikey",
        "Client-Agent",
        "X-Fields",
        "X-Forwarded-For",
        "Proxied-For",
        "Proxy-Authorization",
        "Idempotency-Key",
    ]
)
EXPOSED_HEADERS = ", ".join(
    ["Horde-Node", "Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"]
)
PREFLIGHT_SECONDS = 86400  # browsers ask again at the latest after this


def write_json_with_standard_library(api: Api) -> None:
    """Replace the writer of restx, which is another library wherever that happens to be
    installed.
    """

    @api.representation(JSON_TYPE)
    def write(data: object, status: int, headers: dict[str, str] | None = None) -> Response:
        if isinstance(data, WrittenAnswer):
            response = build_written_response(data)
            response.status_code = status
        else:
            response = make_response(write_json(data, ensure_ascii=True), status)
        response.headers.extend(headers or {})
        return response


def build_written_response(answer: WrittenAnswer) -> Response:
    """An answer that is ready, packed for a client that takes it so; unpacked when its fields are
    to be narrowed.
    """
    takes_packed = request.accept_encodings.quality("gzip") > 0 and "field_mask" not in g
    packed = answer.pack() if takes_packed else None
    response = make_response(answer.body if packed is None else packed)
    response.headers["Vary"] = "Accept-Encoding"
    if packed is not None:
        response.headers["Content-Encoding"] = "gzip"
    return response


def register_response_hooks(app: Flask, config: Config) -> None:
    """Finish every response of `app`."""
    app.before_request(parse_field_mask)
    app.after_request(apply_field_mask)
    app.after_request(build_header_writer(config))


def answer_preflight() -> Response | None:
    """204 with the route's methods for any OPTIONS on a route that exists; it needs no key and
    costs no rate limit.
    """
    if (
        request.method != "OPTIONS"
        or request.routing_exception is not None
        or request.url_rule is None
    ):
        return None
    methods = sorted(request.url_rule.methods or ())
    return Response(
        status=204,
        headers={"Allow": ", ".join(methods), "Access-Control-Max-Age": str(PREFLIGHT_SECONDS)},
    )


def parse_field_mask() -> None:
    """Read `X-Fields` before the route acts: a malformed mask is a 400 without effect."""
    text = request.headers.get("X-Fields", "").strip()
    if not text:
        return
    try:
        g.field_mask = Mask(text, skip=True)
    except (MaskError, IndexError):  # restx trips over a lone bracket with an IndexError
        raise BadRequest("X-Fields is no list of fields.") from None


def apply_field_mask(response: Response) -> Response:
    """Narrow a successful JSON answer to the fields of `X-Fields`, in each entry when it is a
    list.
    """
    if (
        "field_mask" not in g
        or response.mimetype != JSON_TYPE
        or not 200 <= response.status_code < 300
    ):
        return response
    response.set_data(write_document(narrow(read_json(response.get_data()), g.field_mask)))
    return response


def narrow(value: object, mask: Mapping[str, object]) -> object:
    """The fields of `mask` that `value` has, in each entry of a list; a value without fields stays
    as it is.
    """
    if isinstance(value, list):
        return [narrow(entry, mask) for entry in value]
    if not isinstance(value, dict):
        return value
    fields = value if "*" in mask else [field for field in mask if field in value]
    return {
        field: (
            narrow(value[field], inner)
            if isinstance(inner := mask.get(field), Mapping)
            else value[field]
        )
        for field in fields
    }


def build_header_writer(config: Config) -> Callable[[Response], Response]:
    """A hook that writes the common headers of this node."""
    common = [
        ("Access-Control-Allow-Origin", "*"),
        ("Access-Control-Allow-Methods", ALLOWED_METHODS),
        ("Access-Control-Allow-Headers", ALLOWED_HEADERS),
        ("Access-Control-Expose-Headers", EXPOSED_HEADERS),
        ("Horde-Node", f"{socket.gethostname()}:{config.port}:{VERSION}"),
    ]

    def write_common_headers(response: Response) -> Response:
        headers = response.headers
        headers.extend(common)  # no route sets one of them, and to look for it costs more
        if response.mimetype == JSON_TYPE:
            headers["Content-Type"] = f"{JSON_TYPE}; charset=utf-8"
        return response

    return write_common_headers
