# SPDX-License-Identifier: AGPL-3.0-or-later
"""Models of the Swagger document from the shapes of bodies and answers.

Pydantic describes a shape in JSON Schema 2020-12, of which Swagger 2.0 knows less: references to
other shapes are resolved in place, "or null" is left out, and exclusive bounds become flags.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from flask_restx import Namespace
from pydantic import BaseModel, TypeAdapter

from horde.shapes.base import RequestError

# Words of a schema that mean the same in Swagger 2.0.
_KEPT = frozenset(
    {"type", "description", "enum", "format", "items", "required", "pattern", "default"}
    | {"minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems"}
)

type Schema = dict[str, Any]

REFUSALS = {
    400: "The request as sent can never be served; `errors` when the body breaks its schema.",
    401: "No account has the key.",
    403: "Not allowed, or not now.",
    404: "Nothing there by this id or name.",
    409: "Not what comes next.",
    413: "The body is over its bound.",
    415: "The body is not JSON, or encoded.",
    429: "Too many requests: without `rc` a rate limit, else too many generations waiting.",
    503: "A part that is needed is away, or switched off.",
}
BODY_REFUSALS = (400, 413, 415, 429, 503)


def build_body_model(namespace: Namespace, shape: type, name: str | None = None) -> Any:
    """The restx model of a body, under its own name or the one that clients know it by."""
    return _build_model(namespace, shape, "validation", name)


def build_answer_model(namespace: Namespace, shape: type, name: str | None = None) -> Any:
    """The restx model of an answer: a pydantic class, or a TypedDict where one is too slow."""
    return _build_model(namespace, shape, "serialization", name)


def build_query_params(shape: type[BaseModel]) -> dict[str, Schema]:
    """The parameters of a query string, as `Namespace.doc(params=...)` takes them."""
    schema = convert_schema(shape.model_json_schema())
    required = schema.get("required", [])
    return {
        name: {"in": "query", **value, **({"required": True} if name in required else {})}
        for name, value in schema.get("properties", {}).items()
    }


def document_refusals(namespace: Namespace, *statuses: int) -> Callable[[Any], Any]:
    """A decorator that adds refusals to the document of a method."""
    refusal = build_answer_model(namespace, RequestError)

    def decorate(method: Any) -> Any:
        for status in statuses:
            method = namespace.response(status, REFUSALS[status], refusal)(method)
        return method

    return decorate


def _build_model(
    namespace: Namespace,
    shape: type,
    mode: Literal["validation", "serialization"],
    name: str | None,
) -> Any:
    return namespace.schema_model(
        name or shape.__name__, convert_schema(TypeAdapter(shape).json_schema(mode=mode))
    )


def convert_schema(schema: Mapping[str, Any]) -> Schema:
    """A schema that pydantic made, in the words of Swagger 2.0.

    Shapes may not contain themselves.
    """
    return _convert(schema, schema.get("$defs", {}))


def _convert(schema: Mapping[str, Any], shapes: Mapping[str, Any]) -> Schema:
    if "$ref" in schema:
        return _convert(shapes[schema["$ref"].rpartition("/")[2]], shapes) | _keep_own_words(schema)
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        # Swagger 2.0 knows no choice between types: without a single one anything is allowed.
        chosen = _convert(choices[0], shapes) if len(choices) == 1 else {}
        return chosen | _keep_own_words(schema)
    converted = _keep_own_words(schema)
    if "const" in schema:
        converted["enum"] = [schema["const"]]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in schema:
            converted |= {bound: schema[exclusive], exclusive: True}
    if "items" in schema:
        converted["items"] = _convert(schema["items"], shapes)
    if "properties" in schema:
        converted["properties"] = {
            name: _convert(value, shapes) for name, value in schema["properties"].items()
        }
    if isinstance(values := schema.get("additionalProperties"), Mapping):
        converted["additionalProperties"] = _convert(values, shapes)
    return converted


def _keep_own_words(schema: Mapping[str, Any]) -> Schema:
    return {
        word: value
        for word, value in schema.items()
        if word in _KEPT and not (word == "default" and value is None)
    }
