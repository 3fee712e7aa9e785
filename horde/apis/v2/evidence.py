# SPDX-License-Identifier: AGPL-3.0-or-later
"""The evidence of prompts that were refused or reported, and notes on it."""

from flask_restx import Api, Namespace, Resource

from horde.actions import evidence
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import require_api_key
from horde.apis.responses import PRIVATE
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.limiter import limit_evidence_note, limit_evidence_read
from horde.shapes.evidence import EvidenceEvent, EvidenceNote, EvidenceNoteInput, EvidenceQuery

namespace = Namespace("evidence", description="For moderators.", path="/v2/operations/moderation")
evidence_event = build_answer_model(namespace, EvidenceEvent)
evidence_note = build_answer_model(namespace, EvidenceNote)
note_input = build_body_model(namespace, EvidenceNoteInput)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject


@namespace.route("/prompts")
class ModerationPrompts(Resource):
    """Prompts that were refused or reported."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(EvidenceQuery))
    @namespace.response(200, "The events", [evidence_event])
    @namespace.response(
        400,
        "InvalidOperationsLimit, InvalidOperationsCursor, InvalidModerationTimeRange,"
        " InvalidModerationAddressFilter, InvalidModerationEventID",
    )
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @limit_evidence_read
    def get(self) -> tuple[list[Details], int, dict[str, str]]:
        """Prompts that were refused or reported, the newest first. Who reads their texts is
        recorded.
        """
        query = read_query(EvidenceQuery)
        events = evidence.list_evidence(require_api_key(), query)
        return [event.dump() for event in events], 200, PRIVATE


@namespace.route("/prompts/<string:event_id>/notes")
class ModerationPromptNotes(Resource):
    """What moderators noted on an event."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(note_input, validate=False)
    @namespace.response(200, "The note", evidence_note)
    @namespace.response(400, "InvalidModerationNote, InvalidModerationEventID")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "ModerationEventNotFound")
    @limit_evidence_note
    def post(self, event_id: str) -> tuple[Details, int, dict[str, str]]:
        """Note something on an event."""
        body = read_body(EvidenceNoteInput)
        return evidence.add_note(require_api_key(), event_id, body).dump(), 200, PRIVATE


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
