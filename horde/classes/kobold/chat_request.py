# SPDX-License-Identifier: AGPL-3.0-or-later
"""The entrances to chat that the code map names.

Each is written in `horde/chat/`, where the rest of the house imports it. The verification of a
reply stands here: its last step runs a helper process, which the pure package may not.
Source: docs/reference/code-map.md.
"""

from dataclasses import dataclass
from typing import Final

from horde_sdk.generation_parameters.text.chat_policy import ChatConformance

from horde.chat import (
    context,
    declaration,
    fingerprint,
    flattening,
    job,
    messages,
    reply,
    request,
    stored_objects,
    submission,
)
from horde.chat.reply import (
    check_call_ids,
    check_called_functions,
    check_tool_choice,
    keep_single_call,
)
from horde.chat.wire import ChatExtras, Reply
from horde.chat_contract import WORKER_FAULT_MESSAGES
from horde.classes.kobold.reply_format import check_response_format
from horde.shapes.jobs import SubmissionState as SubmissionState

CHAT_WORKER_FAULT_MESSAGES: Final = WORKER_FAULT_MESSAGES

DEFAULT_CHAT_MAX_LENGTH = request.DEFAULT_CHAT_MAX_LENGTH
ChatRequest = request.ChatRequest
build_text_params = request.build_text_params
parse_chat_request = request.parse_chat_request

ChatWorkerTargeting = job.ChatWorkerTargeting
build_chat_request_traits = job.build_chat_request_traits
build_worker_targeting = job.build_worker_targeting
chat_tools_temperature = job.chat_tools_temperature
required_chat_features = job.required_chat_features

estimate_chat_prompt_tokens = flattening.estimate_chat_prompt_tokens
flatten_messages = flattening.flatten_messages

rewrite_message_texts = messages.rewrite_message_texts

SizedContext = context.SizedContext
lower_max_length = context.lower_max_length
size_chat_context = context.size_chat_context
truncate_oldest_messages = context.truncate_oldest_messages

CHAT_STREAM_PROGRESS_KEY = job.CHAT_STREAM_PROGRESS_KEY
build_chat_extras = job.build_chat_extras
build_chat_job_payload = job.build_chat_job_payload
build_stored_chat_extras = job.build_stored_chat_extras
build_worker_chat_extras = job.build_worker_chat_extras
select_chat_transport = job.select_chat_transport
streams_progress = job.streams_progress

ChatMessagesOffload = stored_objects.ChatMessagesOffload
build_chat_messages_offload = stored_objects.build_chat_messages_offload
replace_image_urls = stored_objects.replace_image_urls

OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS = fingerprint.OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS
build_operation_fingerprint = fingerprint.build_operation_fingerprint

build_stored_reply = reply.build_stored_reply
chat_reply_characters = reply.chat_reply_characters
chat_reply_finish_reason = reply.chat_reply_finish_reason
list_reply_texts = reply.list_reply_texts

ChatDeclaration = declaration.ChatDeclaration
parse_chat_declaration_fields = declaration.parse_chat_declaration_fields

ChatSubmission = submission.ChatSubmission
check_submitted_model = submission.check_submitted_model
check_text_job_submission = submission.check_text_job_submission
is_chat_submission = submission.is_chat_submission
parse_chat_submission = submission.parse_chat_submission


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedChatReply:
    """A reply that may be stored, and how many calls the single-call rule took out of it."""

    message: Reply
    dropped_tool_call_count: int = 0


def verify_chat_reply(
    message: Reply,
    chat_extras: ChatExtras | None,
    conformance: ChatConformance,
    state: SubmissionState = SubmissionState.OK,
) -> VerifiedChatReply:
    """Check a reply against what the client asked for, whatever its worker declared.

    A censored reply is held to the rules of every reply alone: a withheld text cannot match a
    schema. Runs a helper process for a strict schema, so no transaction may be open. Raises
    BadRequest with ChatSubmitInvalid, or with ChatSubmitNonconformant under strict.
    """
    extras = chat_extras or {}
    is_strict = conformance is ChatConformance.STRICT and state is SubmissionState.OK
    kept, dropped_count = keep_single_call(message, extras) if is_strict else (message, 0)
    check_called_functions(kept, extras)
    check_call_ids(kept)
    if is_strict:
        check_tool_choice(kept, extras)
        check_response_format(kept, extras)
    return VerifiedChatReply(message=kept, dropped_tool_call_count=dropped_count)
