# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a reply is worth, by the model that wrote it."""

from decimal import Decimal

from horde.classes.base.worker import is_backend_validated
from horde.config import Config
from horde.database.settlements import ServedModel, compute_job_kudos
from horde.database.text_jobs import TextJob
from horde.model_reference import get_text_model_multiplier, is_known_text_model


def compute_reward(job: TextJob, tokens: int, config: Config) -> Decimal:
    """Kudos of a reply of so many tokens to a job, by the model that served it."""
    model = ServedModel(
        multiplier=get_text_model_multiplier(job.model),
        is_known=is_known_text_model(job.model),
        is_validated=is_backend_validated(job.bridge_agent, config.validated_backends),
        is_targeted=config.require_matched_targeting and job.lists_workers,
    )
    return compute_job_kudos(job, tokens, model)
