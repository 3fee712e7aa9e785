# SPDX-License-Identifier: AGPL-3.0-or-later
"""What every response has in common: CORS, the node's name, the charset, and the fields a client
asked for.
"""

import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flask import Flask, Response, g, request
from flask_restx import Api
from flask_restx.mask import Mask, MaskError

from horde.config import VERSION, Config
from horde.exceptions import BadRequest
from horde.json_text import read_json, write_document, write_json
from horde.written_answer import WrittenAnswer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

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
    """Replace what makes answers in restx: it negotiates the one type that there is, and writes
    with another library wherever that happens to be installed.
    """

    def make_response(
        data: object, status: int = 200, headers: Mapping[str, str] | None = None, **_: object
    ) -> Response:
        if isinstance(data, WrittenAnswer):
            response = build_written_response(data)
            response.status_code = status
        else:
            body = write_json(data, ensure_ascii=True).encode()
            response = Response(body, status, content_type=JSON_TYPE)
        if headers:
            response.headers.extend(headers)
        return response

    api.make_response = make_response


def build_written_response(answer: WrittenAnswer) -> Response:
    """An answer that is ready, packed for a client that takes it so; unpacked when its fields are
    to be narrowed.
    """
    takes_packed = request.accept_encodings.quality("gzip") > 0 and "field_mask" not in g
    packed = answer.pack() if takes_packed else None
    response = Response(answer.body if packed is None else packed, content_type=JSON_TYPE)
    response.headers["Vary"] = "Accept-Encoding"
    if packed is not None:
        response.headers["Content-Encoding"] = "gzip"
    return response


def register_response_hooks(app: Flask, config: Config) -> None:
    """Finish every response of `app`."""
    app.before_request(parse_field_mask)
    app.after_request(apply_field_mask)
    # A list of pairs is cheaper to add to than the headers of werkzeug, which copies them as well.
    finished = write_common_headers(app.wsgi_app, config)
    app.wsgi_app = finished  # type: ignore[assignment,method-assign]


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
    text = request.environ.get("HTTP_X_FIELDS", "").strip()
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


def write_common_headers(call: "WSGIApplication", config: Config) -> "WSGIApplication":
    """The same application, whose answers have the common headers of this node. No route sets one
    of them.
    """
    common = [
        ("Access-Control-Allow-Origin", "*"),
        ("Access-Control-Allow-Methods", ALLOWED_METHODS),
        ("Access-Control-Allow-Headers", ALLOWED_HEADERS),
        ("Access-Control-Expose-Headers", EXPOSED_HEADERS),
        ("Horde-Node", f"{socket.gethostname()}:{config.port}:{VERSION}"),
    ]
    with_charset = {("Content-Type", JSON_TYPE): ("Content-Type", f"{JSON_TYPE}; charset=utf-8")}

    def respond(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            own = [with_charset.get(header, header) for header in headers]
            return start_response(status, own + common, *rest)

        return call(environ, start)

    return respond
