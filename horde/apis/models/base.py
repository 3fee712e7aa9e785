# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the status routes, for the document."""

from typing import Any

from flask_restx import Namespace, fields


def build_active_model(namespace: Namespace) -> Any:
    """An entry of the model list."""
    chat = namespace.model(
        "ChatModelOffer",
        {
            "workers": fields.Integer(
                description=(
                    "Online workers, out of maintenance, that serve chat jobs with the model."
                )
            ),
            "max_context_length": fields.Integer(
                description="The largest context among them, in tokens."
            ),
            "max_length": fields.Integer(description="The longest output among them, in tokens."),
            "features": fields.List(
                fields.String, description="All they declare together, sorted."
            ),
            "created": fields.Integer(
                description="Unix seconds at which the earliest of them was created, or null."
            ),
        },
    )
    return namespace.model(
        "ActiveModel",
        {
            "name": fields.String(description="The name workers offer it by, byte for byte."),
            "count": fields.Integer(description="Threads of the online workers that serve it."),
            "performance": fields.Float(
                description="Tokens per second, averaged over the last hour."
            ),
            "queued": fields.Float(description="Tokens of the waiting requests that name it."),
            "jobs": fields.Float(description="Generations waiting and in flight."),
            "eta": fields.Integer(
                description=(
                    "Seconds until what is queued is done; 10000 when nobody has served it lately."
                )
            ),
            "type": fields.String(enum=["image", "text"]),
            "chat": fields.Nested(chat, skip_none=True, description="Only with chat=true."),
        },
    )


def build_horde_performance(namespace: Namespace) -> Any:
    """The horde in numbers."""
    return namespace.model(
        "HordePerformance",
        {
            "queued_requests": fields.Integer(
                description="Image generations waiting; this horde takes none."
            ),
            "queued_text_requests": fields.Integer(
                description="Text generations waiting and in flight."
            ),
            "worker_count": fields.Integer(description="Online image workers."),
            "text_worker_count": fields.Integer(description="Online text workers."),
            "thread_count": fields.Integer(description="Threads of the online image workers."),
            "text_thread_count": fields.Integer(description="Threads of the online text workers."),
            "queued_megapixelsteps": fields.Float(description="Image work waiting."),
            "past_minute_megapixelsteps": fields.Float(
                description="Image work delivered in the last minute."
            ),
            "queued_forms": fields.Float(description="Alchemy forms waiting."),
            "interrogator_count": fields.Integer(description="Online alchemists."),
            "interrogator_thread_count": fields.Integer(
                description="Threads of the online alchemists."
            ),
            "queued_tokens": fields.Float(description="Tokens of the waiting text requests."),
            "past_minute_tokens": fields.Float(description="Tokens delivered in the last minute."),
        },
    )
