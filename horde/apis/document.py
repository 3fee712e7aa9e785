# SPDX-License-Identifier: AGPL-3.0-or-later
"""The Swagger document and its page: the class of the API that serves them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flask_restx import Api

from horde.actions.models import find_offered_chat_model
from horde.apis.pages import render_page
from horde.exceptions import ServiceUnavailable

METHODS: Final = ("get", "post", "put", "patch", "delete")
FIRST_TOPICS: Final = ("generate", "status", "users", "sharedkeys", "kudos", "workers")
EXAMPLE_MODEL: Final = "example-model"
_JOB_ID: Final = "00000000-0000-0000-0000-000000000000"

EXAMPLES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "GenerationInputKobold": {
            "prompt": "Once upon a time",
            "params": {"max_length": 80, "max_context_length": 1024},
        },
        "ChatRequest": {
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
                {"role": "user", "content": "Name three fruits."},
            ],
            "max_tokens": 64,
            "temperature": 0,
        },
        "PopInputKobold": {
            "name": "An example of a worker",
            "models": [EXAMPLE_MODEL],
            "max_length": 512,
            "max_context_length": 2048,
        },
        "SubmitInputKobold": {"id": _JOB_ID, "generation": "there was a fox."},
        "ProgressInputKobold": {"id": _JOB_ID, "seq": 1, "delta": {"content": "Apples"}},
        "ModifyWorkerInput": {"maintenance": True, "maintenance_msg": "Back at noon."},
        "ModifyUserInput": {"public_workers": True},
        "TestUserInput": {"username": "tester", "moderator": False, "trusted": True, "kudos": 100},
        "SharedKeyInput": {"kudos": 5000, "expiry": 30, "name": "For a friend"},
        "HordeModesInput": {"invite_only_mode": False},
        "KudosTransferInput": {"username": "Somebody#1", "amount": 10},
        "KudosAwardInput": {"username": "Somebody#1", "amount": 10},
        "CreateTeamInput": {"name": "An example of a team", "info": "We serve at night."},
        "ModifyTeamInput": {"info": "We serve by day."},
        "WorkerMessageInput": {"message": "Please update.", "expiry": 12},
        "TextStyleInput": {
            "name": "an example of a style",
            "info": "Tells short stories.",
            "prompt": "Tell a short story. {p}",
            "models": [EXAMPLE_MODEL],
            "params": {"max_length": 80},
        },
        "TextStylePatch": {"info": "Tells stories."},
        "CollectionInput": {
            "name": "an example of a collection",
            "styles": ["Somebody#1::style::an example of a style"],
        },
        "CollectionPatch": {"info": "Styles for stories."},
        "TriedPrompt": {"prompt": "Is this refused?"},
        "PutNewFilter": {"regex": "a bad word", "filter_type": 10, "description": "An example."},
        "PatchExistingFilter": {"description": "An example."},
        "AddTimeoutIPInput": {"ipaddr": "198.51.100.1", "hours": 24},
        "DeleteTimeoutIPInput": {"ipaddr": "198.51.100.1"},
        "AddWorkerTimeout": {"days": 1},
        "EvidenceNoteInput": {"note": "Told the owner."},
    }
)
"""Bodies that the document's page offers to send. Without them it makes one up that sets every
field, and so asks for things that exclude each other.
"""


def find_chat_model() -> str:
    """A model that a chat worker offers now; a made-up one when there is none."""
    try:
        return find_offered_chat_model() or EXAMPLE_MODEL
    except ServiceUnavailable:
        return EXAMPLE_MODEL


class DocumentedApi(Api):
    """restx's API with bodies that can be sent as they are, and its page also without the slash."""

    @property
    def __schema__(self) -> dict[str, Any]:
        """The document."""
        document: dict[str, Any] = super().__schema__
        # A chat has to name a model that somebody serves, or it is refused.
        chat = {"model": find_chat_model(), **EXAMPLES["ChatRequest"]}
        for name, example in {**EXAMPLES, "ChatRequest": chat}.items():
            if definition := document.get("definitions", {}).get(name):
                definition["example"] = example
        return document

    def _register_apidoc(self, app: object) -> None:
        """Nothing: it would serve the files of Swagger UI, which nothing here loads."""

    def render_root(self) -> Any:
        """`/api`: restx would answer 404."""
        return self.render_doc()

    def render_doc(self) -> Any:
        """The page: restx's own has code inside, loads a megabyte, and knows no dark."""
        document = self.__schema__
        return render_page("api.html", document=document, topics=list_topics(document))


def list_topics(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operations of the document by their topic, `{name, description, operations}` each, those
    of most people first.
    """
    operations: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, found in methods.items():
            if method in METHODS:
                operations.setdefault(found["tags"][0], []).append(
                    {
                        "id": found["operationId"],
                        "path": path,
                        "method": method,
                        "summary": found.get("summary", ""),
                        "description": found.get("description", ""),
                        "responses": [
                            (code, answer.get("description", ""))
                            for code, answer in sorted(found["responses"].items())
                        ],
                    }
                )
    topics = [
        {**tag, "operations": operations[tag["name"]]}
        for tag in document["tags"]
        if tag["name"] in operations
    ]
    first = {name: place for place, name in enumerate(FIRST_TOPICS)}
    return sorted(topics, key=lambda topic: first.get(topic["name"], len(first)))
