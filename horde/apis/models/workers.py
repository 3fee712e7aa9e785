# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the worker routes, for the document."""

from typing import Any

from flask_restx import Namespace, fields


def build_worker_details(namespace: Namespace) -> Any:
    """A worker. Keys without a value are left out, but for those of `team`."""
    kudos = namespace.model(
        "WorkerKudosDetails", {"generated": fields.Float, "uptime": fields.Float}
    )
    team = namespace.model("TeamDetailsLite", {"name": fields.String, "id": fields.String})
    limits = namespace.model(
        "ChatLimits",
        {
            "max_context_length": fields.Integer,
            "max_length": fields.Integer,
            "tools_max_temperature": fields.Float,
        },
    )
    chat = namespace.model(
        "WorkerChatDeclaration",
        {
            "model_id": fields.String,
            "features": fields.List(fields.String),
            "limits": fields.Nested(limits),
            "image_transports": fields.List(fields.String),
        },
    )
    return namespace.model(
        "WorkerDetails",
        {
            "type": fields.String(enum=["image", "text", "interrogation"]),
            "name": fields.String,
            "id": fields.String,
            "online": fields.Boolean(description="It polled within the last 300 seconds."),
            "requests_fulfilled": fields.Integer,
            "uncompleted_jobs": fields.Integer(description="Jobs it took and did not finish."),
            "nonconformant_replies": fields.Integer(
                description="Replies refused for breaking a strict chat request."
            ),
            "kudos_rewards": fields.Float,
            "kudos_details": fields.Nested(kudos),
            "performance": fields.String(example="14.2 tokens per second"),
            "threads": fields.Integer,
            "uptime": fields.Integer(description="Seconds."),
            "maintenance_mode": fields.Boolean,
            "info": fields.String,
            "nsfw": fields.Boolean,
            "trusted": fields.Boolean,
            "flagged": fields.Boolean,
            "models": fields.List(fields.String),
            "team": fields.Nested(team),
            "bridge_agent": fields.String,
            "max_length": fields.Integer(description="Tokens, of text jobs."),
            "max_context_length": fields.Integer(description="Tokens, of text jobs."),
            "accepts_chat_jobs": fields.Boolean,
            "accepts_prompt_jobs": fields.Boolean,
            "chat": fields.Nested(chat, description="Absent when the worker takes no chat jobs."),
            "owner": fields.String(
                description="When the owner shows it, and to the owner and moderators."
            ),
            "messages": fields.List(fields.Raw, description="As owner."),
            "paused": fields.Boolean(description="Moderators only."),
            "suspicious": fields.Integer(description="Moderators only."),
            "ipaddr": fields.String(description="Moderators only."),
            "contact": fields.String(description="Moderators only."),
        },
    )
