# SPDX-License-Identifier: AGPL-3.0-or-later
"""The line of the log that each request of the front leaves."""

import re
import time
from typing import Final

from starlette.datastructures import Headers

from horde.logger import get_logger
from horde.oai.callers import find_client_request_id
from horde.oai.calls import OpenCall
from horde.oai.errors import ErrorAnswer

logger = get_logger(__name__)

# What a path of keys may look like in the log. A key of any other kind may be text of a prompt.
_LOGGED_PARAM: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")


def log_request(
    call: OpenCall,
    headers: Headers,
    front_id: str,
    status: int | None,
    error: ErrorAnswer | None,
) -> None:
    """One line a request. No path, no value of a body and no API key; of a refusal the name of
    the parameter.
    """
    fields: dict[str, object] = {
        "request_id": front_id,
        "status": status,
        "seconds": round(time.monotonic() - call.accepted_at, 3),
    }
    if error is not None:
        fields |= {
            "code": error.code,
            "phase": call.phase,
            "rc": error.metadata.get("rc"),
        }
        param = error.param
        if param is not None and _LOGGED_PARAM.fullmatch(param):
            fields["param"] = param
    if call.native_id is not None:
        fields |= {
            "form": call.form,
            "native_id": call.native_id,
            "stream": call.is_stream,
            "client_gone": call.phase == "gone",
        }
    if call.served_by is not None:
        fields |= {"worker_id": call.served_by[0], "model": call.served_by[1]}
    if (client_request_id := find_client_request_id(headers)) is not None:
        fields["client_request_id"] = client_request_id
    logger.info("horde.oai.request_done", extra=fields)
