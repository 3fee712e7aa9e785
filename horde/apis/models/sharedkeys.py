# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the shared key routes, for the document."""

from typing import Any

from flask_restx import Namespace, fields


def build_shared_key_input(namespace: Namespace) -> Any:
    """What its owner sets of a shared key."""
    return namespace.model(
        "SharedKeyInput",
        {
            "kudos": fields.Integer(
                min=-1,
                max=50_000_000,
                default=5000,
                description="The budget; -1 is unlimited, 0 is empty.",
            ),
            "expiry": fields.Integer(
                min=-1, max=36_500, default=-1, description="Days from now; -1 is never."
            ),
            "name": fields.String(min_length=3, max_length=255, description="What the key is for."),
            "max_image_pixels": fields.Integer(
                min=-1, default=-1, description="Of one image; -1 is any."
            ),
            "max_image_steps": fields.Integer(
                min=-1, default=-1, description="Of one image; -1 is any."
            ),
            "max_text_tokens": fields.Integer(
                min=-1, default=-1, description="Output of one text or chat job; -1 is any."
            ),
        },
    )


def build_shared_key_details(namespace: Namespace) -> Any:
    """A shared key as everybody sees it."""
    return namespace.model(
        "SharedKeyDetails",
        {
            "id": fields.String(description="The key itself."),
            "username": fields.String(description="Its owner, name#id."),
            "name": fields.String(),
            "kudos": fields.Integer(description="What is left of the budget; -1 is unlimited."),
            "expiry": fields.DateTime("rfc822", description="Null is never."),
            "utilized": fields.Integer(description="Kudos spent by it."),
            "max_image_pixels": fields.Integer(),
            "max_image_steps": fields.Integer(),
            "max_text_tokens": fields.Integer(),
        },
    )


def build_deleted(namespace: Namespace) -> Any:
    """The answer to a delete."""
    return namespace.model("SimpleResponse", {"message": fields.String(description="OK")})
