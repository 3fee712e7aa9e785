# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a caller can do about each refusal: one sentence for each code, told in every answer that
has it.

A code without a sentence here has messages that say it themselves, since what helps differs from
case to case or the contract fixes their words. Source: docs/reference/errors.md, "Codes".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from horde.return_codes import ReturnCode

_OWN_ACCOUNT: Final = "Register an account of your own."
_NEXT_JOB: Final = "Drop the job and pop another."
_OTHER_WORDS: Final = "Choose other words."
_CHANGE_SOMETHING: Final = "Send at least one change."
_REUSE_A_NAME: Final = "Use the name of a worker you have, or ask a moderator for more."

REMEDIES: Final[Mapping[ReturnCode, str]] = MappingProxyType(
    {
        ReturnCode.INVALID_API_KEY: "Check the key, or register an account to get one.",
        ReturnCode.WRONG_CREDENTIALS: "Use the key of the worker's owner.",
        ReturnCode.NOT_ADMIN: "Ask an admin.",
        ReturnCode.NOT_MODERATOR: "Ask a moderator.",
        ReturnCode.NOT_OWNER: "Use the key of its owner.",
        ReturnCode.UNTRUSTED_TEAM_CREATION: "Ask a moderator for trust, or join a team.",
        ReturnCode.MESSAGES_ONLY_OWN_WORKERS: "Name workers of your own.",
        ReturnCode.ANON_FORBIDDEN: _OWN_ACCOUNT,
        ReturnCode.ANON_FORBIDDEN_WORKER: _OWN_ACCOUNT,
        ReturnCode.ANON_FORBIDDEN_USER_MOD: _OWN_ACCOUNT,
        ReturnCode.ANON_FORBIDDEN_USER: "Use the key of the account itself.",
        ReturnCode.NOT_USER_OR_MOD: "Use the key of the account itself, or ask a moderator.",
        ReturnCode.CANNOT_DELETE_MOD: "Have the role taken off first.",
        ReturnCode.CANNOT_WIPE_ACTIVE_USER: "Try again once it was left alone for 30 days.",
        ReturnCode.DELETED_USER: "Use another account, or ask a moderator to undelete this one.",
        ReturnCode.NON_SERVICE_FORBIDDEN: "Ask a moderator for the service role.",
        ReturnCode.USER_NOT_DELETED: "Leave 'undelete' out.",
        ReturnCode.ONLY_SERVICE_ACCOUNT_PROXY: "Leave 'proxied_account' out.",
        ReturnCode.REQUIRES_TRUST: "Leave 'disable_batching' out, or send 'n' 1.",
        ReturnCode.MISSING_PROMPT: "Send some text in 'prompt'.",
        ReturnCode.CORRUPT_PROMPT: "Write it in other words.",
        ReturnCode.TOO_MANY_PROMPTS: "Wait until some of those that are queued are done.",
        ReturnCode.WORKER_NOT_FOUND: "The workers are listed at /api/v2/workers.",
        ReturnCode.KUDOS_UPFRONT: "Ask for a shorter reply, or earn kudos by running a worker.",
        ReturnCode.SHARED_KEY_EMPTY: "Use another key, or ask its owner for kudos.",
        ReturnCode.SHARED_KEY_EXPIRED: "Use another key, or ask its owner to prolong it.",
        ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS: (
            "Ask for a shorter reply, use another key, or ask its owner for kudos."
        ),
        ReturnCode.SHARED_KEY_INVALID: "Name a shared key of your own.",
        ReturnCode.SHARED_KEY_ASSIGNED_STYLES: "Use another key.",
        ReturnCode.TOKEN_OVERFLOW: "Lower 'max_length', or raise 'max_context_length'.",
        ReturnCode.MISSING_FULL_SAMPLER_ORDER: "Name all of them, or leave 'sampler_order' out.",
        ReturnCode.TOO_MANY_STOP_SEQUENCES: "Send fewer of them.",
        ReturnCode.EXCESSIVE_STOP_SEQUENCE: "Send fewer or shorter ones.",
        ReturnCode.PROMPT_EXCEEDS_CONTEXT: "Shorten what you send, or ask for a shorter reply.",
        ReturnCode.INVALID_PROMPT_SIZE: "Send fewer words in 'template_fields'.",
        ReturnCode.INVALID_PROMPT_ENCODING: "Send whole characters.",
        ReturnCode.NUL_BYTE_IN_PAYLOAD: "Leave it out.",
        ReturnCode.INVALID_EXTRA_SOURCE_IMAGES: "Send images in a chat request.",
        ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES: "Send fewer images.",
        ReturnCode.MORE_THAN_MIN_EXTRA_SOURCE_IMAGE: "Send fewer images.",
        ReturnCode.REQUEST_NOT_FOUND: (
            "Check its id and the route. A request that has expired has to be sent again."
        ),
        ReturnCode.NOT_REQUEST_OWNER: "Use the key that sent it, or its account's own.",
        ReturnCode.STYLE_NOT_FOUND: "Check its name, or leave 'style' out.",
        ReturnCode.COLLECTION_NOT_FOUND: "The collections are listed at /api/v2/collections.",
        ReturnCode.STYLE_MISMATCH: "Use styles of one type.",
        ReturnCode.STYLE_GET_MISMATCH: "Use the route of its type.",
        ReturnCode.STYLE_PROMPT_MISSING_VARS: "Put {p} where the prompt belongs.",
        ReturnCode.STYLE_PROMPT_FIELD_INVALID: "Write it as {name}.",
        ReturnCode.STYLE_DECLARATION_INVALID: "Change it, or leave it out.",
        ReturnCode.STYLE_POLICY_OVERRIDABLE_MISPLACED: "Send both, or neither.",
        ReturnCode.STYLE_PARAMETER_ABOVE_CEILING: "Ask for no more than that.",
        ReturnCode.STYLES_ANON_FORBIDDEN: _OWN_ACCOUNT,
        ReturnCode.STYLES_REQUIRES_CUSTOMIZER: "Ask a moderator for the customizer role.",
        ReturnCode.TEMPLATE_FIELDS_REQUIRE_STYLE: "Send 'style' too.",
        ReturnCode.TEMPLATE_FIELD_UNKNOWN: "Send the fields that the style declares.",
        ReturnCode.TEMPLATE_FIELD_MISSING: "Send it in 'template_fields'.",
        ReturnCode.TEMPLATE_FIELDS_MATCH_NO_COLLECTION_STYLE: (
            "Send the fields of one of its styles."
        ),
        ReturnCode.WORKER_MAINTENANCE: "End the worker's maintenance to get jobs again.",
        ReturnCode.WORKER_FLAGGED_MAINTENANCE: "Ask a moderator to take the flag off.",
        ReturnCode.WORKER_INVITE_ONLY: "Ask a moderator for an invitation.",
        ReturnCode.TOO_MANY_WORKERS: _REUSE_A_NAME,
        ReturnCode.TOO_MANY_WORKERS_TRUSTED: _REUSE_A_NAME,
        ReturnCode.TOO_MANY_SAME_IPS: "Stop one of them, or ask a moderator for trust.",
        ReturnCode.POLYMORPHIC_NAME_CONFLICT: "Choose another name.",
        ReturnCode.PROFANE_WORKER_NAME: _OTHER_WORDS,
        ReturnCode.PROFANE_BRIDGE_AGENT: _OTHER_WORDS,
        ReturnCode.PROFANE_WORKER_INFO: _OTHER_WORDS,
        ReturnCode.INVALID_JOB_ID: _NEXT_JOB,
        ReturnCode.DUPLICATE_GEN: _NEXT_JOB,
        ReturnCode.ABORTED_GEN: _NEXT_JOB,
        ReturnCode.WORKER_NAME_ALREADY_EXISTS: "Choose another name.",
        ReturnCode.TOO_LONG_WORKER_NAME: "Choose a shorter text.",
        ReturnCode.NO_WORKER_MOD_SELECTED: _CHANGE_SOMETHING,
        ReturnCode.WORKERMESSAGE_NOT_FOUND: "Your messages are listed at /api/v2/workers/messages.",
        ReturnCode.NO_TEAM_MOD_SELECTED: _CHANGE_SOMETHING,
        ReturnCode.NO_USER_MOD_SELECTED: _CHANGE_SOMETHING,
        ReturnCode.NO_SHARED_KEY_MOD_SELECTED: _CHANGE_SOMETHING,
        ReturnCode.NO_HORDE_MOD_SELECTED: _CHANGE_SOMETHING,
        ReturnCode.NOT_ALLOWED_AWARDS: "Give kudos of your own instead.",
        ReturnCode.INVALID_TARGET_USERNAME: "Write it as name#id, or send the id of a shared key.",
        ReturnCode.KUDOS_TRANSFER_TO_ANON: "Choose another account.",
        ReturnCode.KUDOS_TRANSFER_FROM_ANON: "Register an account of your own.",
        ReturnCode.KUDOS_TRANSFER_TO_SELF: "Choose another account.",
        ReturnCode.KUDOS_TRANSFER_NOT_ENOUGH: "Give less, or earn kudos by running a worker.",
        ReturnCode.NEGATIVE_KUDOS_TRANSFER: "Send an amount of at least 1.",
        ReturnCode.INVALID_KUDOS_TRANSFER_AMOUNT: "Send an amount of at least 1.",
        ReturnCode.TOO_FAST_KUDOS_TRANSFERS: "Wait a minute.",
        ReturnCode.FAULT_WHEN_KUDOS_SENDING: "Ask a moderator.",
        ReturnCode.FAULT_WHEN_KUDOS_RECEIVING: "Ask a moderator.",
        ReturnCode.SOURCE_ACCOUNT_FLAGGED: "Ask a moderator to take the flag off.",
        ReturnCode.TARGET_ACCOUNT_FLAGGED: "Choose another account.",
        ReturnCode.EDUCATION_CANNOT_SEND_KUDOS: "Give from another account.",
        ReturnCode.IDEMPOTENCY_KEY_CONFLICT: "Send another key with a new gift.",
        ReturnCode.INVALID_AWARD_USERNAME: "Write it as name#id.",
        ReturnCode.KUDOS_AWARD_TO_ANON: "Choose another account.",
        ReturnCode.INVALID_OPERATIONS_LIMIT: "Send a number from 1 to 100.",
        ReturnCode.INVALID_OPERATIONS_CURSOR: "Send the id of the last event you have.",
        ReturnCode.INVALID_MODERATION_TIME_RANGE: (
            "Write moments as 2026-01-31T12:00:00Z, the earlier one in 'since'."
        ),
        ReturnCode.INVALID_MODERATION_ADDRESS_FILTER: (
            "Send an address in 'ipaddr', or the key of an event in 'ip_subject_key'."
        ),
        ReturnCode.INVALID_MODERATION_EVENT_ID: "Send the number of an event.",
        ReturnCode.INVALID_MODERATION_NOTE: "Send 1 to 2000 characters.",
        ReturnCode.MODERATION_EVENT_NOT_FOUND: (
            "The events are listed at /api/v2/operations/moderation/prompts."
        ),
        ReturnCode.FILTER_NOT_FOUND: "The filters are listed at /api/v2/filters.",
        ReturnCode.NO_FILTER_MOD_SELECTED: "Send at least one change.",
        ReturnCode.USER_NOT_FOUND: "Check the id or the key.",
        ReturnCode.TEAM_NOT_FOUND: "Check the team's id.",
        ReturnCode.MODEL_NOT_FOUND: "The models are listed at /api/v2/status/models.",
        ReturnCode.TEAM_NAME_ALREADY_EXISTS: "Choose another name.",
        ReturnCode.NAME_ALREADY_EXISTS: "Choose another name.",
        ReturnCode.PROFANE_TEAM_NAME: _OTHER_WORDS,
        ReturnCode.PROFANE_TEAM_INFO: _OTHER_WORDS,
        ReturnCode.PROFANITY: _OTHER_WORDS,
        ReturnCode.PROFANE_USER_NAME: _OTHER_WORDS,
        ReturnCode.PROFANE_USER_CONTACT: _OTHER_WORDS,
        ReturnCode.PROFANE_ADMIN_COMMENT: _OTHER_WORDS,
        ReturnCode.TOO_LONG_USER_NAME: "Choose a shorter name.",
        ReturnCode.REQUEST_TOO_LARGE: "Send less at once.",
        ReturnCode.OPERATION_KEY_CONFLICT: "Send another operation key with a new request.",
        ReturnCode.UNKNOWN_CHAT_MODEL: "Choose one from the list of chat models.",
        ReturnCode.CHAT_ADMISSION_DISABLED: "Try again later.",
        ReturnCode.CHAT_IMAGE_STORAGE_UNAVAILABLE: "Try again later.",
        ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED: "Send fewer or smaller images.",
        ReturnCode.SOURCE_IMAGE_RESOLUTION_EXCEEDED: "Scale it down.",
        ReturnCode.SOURCE_IMAGE_UNREADABLE: "Send a PNG, JPEG, WebP or GIF.",
        ReturnCode.SOURCE_IMAGE_URL_REFUSED: "Use a public address, or send it as a data URL.",
        ReturnCode.SOURCE_IMAGE_URL_INVALID: (
            "Use an address that answers with the image itself, or send it as a data URL."
        ),
    }
)


def add_remedy(message: str, rc: ReturnCode | None) -> str:
    """The message and what to do about the refusal, unless it says that already."""
    remedy = None if rc is None else REMEDIES.get(rc)
    return message if remedy is None or remedy in message else f"{message} {remedy}"
