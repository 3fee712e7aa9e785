# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the account routes, for the document."""

from typing import Any

from flask_restx import Namespace, fields


def build_user_details(namespace: Namespace) -> Any:
    """An account as its viewer may see it."""
    things = namespace.model(
        "UserThingRecords",
        {
            "megapixelsteps": fields.Float(description="Image work."),
            "tokens": fields.Integer(description="Text work."),
        },
    )
    amounts = namespace.model(
        "UserAmountRecords", {name: fields.Integer() for name in ("image", "text", "interrogation")}
    )
    return namespace.model(
        "UserDetails",
        {
            "username": fields.String(description="The public name, name#id."),
            "id": fields.Integer(description="0 is the anonymous account."),
            "kudos": fields.Float(description="The balance as folded last, within about a second."),
            "evaluating_kudos": fields.Float(
                description="Moderators only. Rewards held until the account is trusted."
            ),
            "concurrency": fields.Integer(description="Generations that may wait at once."),
            "worker_invited": fields.Integer(
                description="Workers it may run beyond the usual number."
            ),
            "moderator": fields.Boolean(),
            "kudos_details": fields.Nested(_build_kudos_details(namespace)),
            "worker_count": fields.Integer(),
            "worker_ids": fields.List(
                fields.String, description="For the owner, or with public_workers."
            ),
            "styles": fields.List(fields.Raw),
            "sharedkey_ids": fields.List(fields.String, description="Owner and moderators."),
            "active_generations": fields.Nested(
                namespace.model(
                    "UserActiveGenerations",
                    {name: fields.List(fields.String) for name in ("text", "image", "alchemy")},
                ),
                description=(
                    "Owner and moderators. Requests that are not done, except those of chat."
                ),
            ),
            "monthly_kudos": fields.Nested(
                namespace.model(
                    "MonthlyKudos",
                    {"amount": fields.Integer(), "last_received": fields.DateTime("rfc822")},
                ),
                description="Moderators only.",
            ),
            "trusted": fields.Boolean(),
            "flagged": fields.Boolean(),
            "vpn": fields.Boolean(description="Owner and moderators."),
            "service": fields.Boolean(),
            "education": fields.Boolean(),
            "customizer": fields.Boolean(),
            "special": fields.Boolean(description="Owner and moderators."),
            "deleted": fields.Boolean(description="Marked for deletion."),
            "suspicious": fields.Integer(description="Moderators only."),
            "pseudonymous": fields.Boolean(description="Registered without an identity provider."),
            "contact": fields.String(description="Owner and moderators."),
            "admin_comment": fields.String(description="Moderators only."),
            "proxy_passkey": fields.String(description="Moderators only."),
            "account_age": fields.Integer(description="Seconds since it was made."),
            "usage": fields.Raw(description="Superseded by records; empty."),
            "contributions": fields.Raw(description="Superseded by records; empty."),
            "records": fields.Nested(
                namespace.model(
                    "UserRecords",
                    {
                        "usage": fields.Nested(things),
                        "contribution": fields.Nested(things),
                        "fulfillment": fields.Nested(amounts),
                        "request": fields.Nested(amounts),
                        "style": fields.Nested(amounts),
                    },
                )
            ),
        },
    )


def _build_kudos_details(namespace: Namespace) -> Any:
    names = (
        "accumulated",
        "gifted",
        "donated",
        "admin",
        "received",
        "recurring",
        "awarded",
        "styled",
    )
    return namespace.model("UserKudosDetails", {name: fields.Float() for name in names})


def build_modify_user_input(namespace: Namespace) -> Any:
    """What may be changed of an account; each key says who may."""
    roles = ("trusted", "flagged", "customizer", "vpn", "service", "education", "special")
    return namespace.model(
        "ModifyUserInput",
        {
            "kudos": fields.Float(description="Admins. Added to the balance; may be negative."),
            "monthly_kudos": fields.Integer(
                description="Admins. Added to the monthly amount; a gain is paid at once too."
            ),
            "usage_multiplier": fields.Float(
                min=0.1, max=10, description="Admins. Scales the usage record, not the charge."
            ),
            "moderator": fields.Boolean(description="Admins. Implies trusted."),
            "concurrency": fields.Integer(min=0, max=500, description="Moderators."),
            "worker_invited": fields.Integer(description="Moderators."),
            **{role: fields.Boolean(description="Moderators.") for role in roles},
            "admin_comment": fields.String(min_length=5, max_length=500, description="Moderators."),
            "public_workers": fields.Boolean(description="Owner or moderators."),
            "username": fields.String(
                min_length=3, max_length=30, description="Owner or moderators."
            ),
            "contact": fields.String(
                min_length=5, max_length=50, description="Owner or moderators."
            ),
            "generate_proxy_passkey": fields.Boolean(
                description="Owner or moderators, of a service account."
            ),
            "undelete": fields.Boolean(
                description="Owner or moderators, of an account marked for deletion."
            ),
        },
    )


def build_modify_user(namespace: Namespace) -> Any:
    """The new values of what was changed."""
    roles = (
        "moderator",
        "trusted",
        "flagged",
        "customizer",
        "vpn",
        "service",
        "education",
        "special",
    )
    return namespace.model(
        "ModifyUser",
        {
            "new_kudos": fields.Float(
                description="The balance with everything that is still queued."
            ),
            "monthly_kudos": fields.Integer(),
            "usage_multiplier": fields.Float(),
            "concurrency": fields.Integer(),
            "worker_invited": fields.Integer(),
            **{role: fields.Boolean() for role in roles},
            "admin_comment": fields.String(),
            "public_workers": fields.Boolean(),
            "username": fields.String(),
            "contact": fields.String(),
            "proxy_passkey": fields.String(description="Shown once to the owner."),
            "undeleted": fields.Boolean(),
        },
    )


def build_test_user_input(namespace: Namespace) -> Any:
    """The account a test asks for."""
    return namespace.model(
        "TestUserInput",
        {
            "username": fields.String(),
            "oauth_id": fields.String(
                description="The same id answers with the same account and a new key."
            ),
            "moderator": fields.Boolean(default=True),
            "trusted": fields.Boolean(default=True),
            "kudos": fields.Integer(
                default=10000, description="The balance to have; null leaves it."
            ),
        },
    )


def build_test_user(namespace: Namespace) -> Any:
    """A test's account and its key."""
    return namespace.model(
        "TestUser",
        {
            "api_key": fields.String(),
            "user_id": fields.String(),
            "username": fields.String(),
            "alias": fields.String(),
            "kudos": fields.Integer(),
            "trusted": fields.Boolean(),
            "moderator": fields.Boolean(),
            "created": fields.Boolean(description="Whether the account is new."),
        },
    )
