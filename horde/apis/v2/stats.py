# SPDX-License-Identifier: AGPL-3.0-or-later
"""The statistics routes."""

from flask_restx import Api, Namespace, Resource

from horde.actions.statistics import show_text_models, show_text_totals
from horde.apis.swagger import build_answer_model
from horde.shapes.statistics import StatsTxtTotals, TxtModelStats
from horde.written_answer import WrittenAnswer

namespace = Namespace("stats", description="What was done.", path="/v2/stats")
text_totals = build_answer_model(namespace, StatsTxtTotals)
text_models = build_answer_model(namespace, TxtModelStats)


@namespace.route("/text/totals")
class StatsTextTotals(Resource):
    """Sums of text."""

    @namespace.response(200, "The sums", text_totals)
    def get(self) -> WrittenAnswer:
        """Generations and tokens of the last minute, hour, day, 30 days, and of all time."""
        return show_text_totals()


@namespace.route("/text/models")
class StatsTextModels(Resource):
    """Sums of text by model."""

    @namespace.response(200, "The counts", text_models)
    def get(self) -> WrittenAnswer:
        """Generations by model in the last day, in 30 days and in all time."""
        return show_text_models()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
