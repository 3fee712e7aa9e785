# SPDX-License-Identifier: AGPL-3.0-or-later
"""Known text models, in memory: how large each is, and whether it was made for adult text.

A bundled list serves from the first request on; a job replaces it when the operator names a source.
Nothing here touches the network until `refresh_text_models` is called.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

from horde.runtime import Part

BUNDLED_FILE = Path(__file__).parent / "data" / "text_models.json"
REFRESH_TIMEOUT_SECONDS = 2.0
MAX_REFERENCE_BYTES = 16 * 1024 * 1024  # the largest published list is a tenth of it
UNKNOWN_MULTIPLIER = 1.0
PARAMETERS_PER_MULTIPLIER = 1_000_000_000

# `.i1-Q4_K_M`, `-IQ3_XS`, `-7B-Q4_K_M`: a word, an optional dash, Q, one or two digits, further
# groups. The word cannot run over a separator and the groups cannot overlap, so a hostile name
# costs time in proportion to
# its length.
_QUANTISATION = re.compile(r"[.,-][^\W_]+?-?Q(?:-[Ii]nt)?[2-9]{1,2}(?:[_.-][^\W_]+)*")


class ModelReferenceError(Exception):
    """The source of the reference cannot be read or holds no models; the list in use stays."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is known of a model."""

    parameters: int
    nsfw: bool = False


@dataclass(slots=True)
class ReferenceState:
    """The list in use; replaced as a whole, so that readers need no lock."""

    models: Mapping[str, TextModel] | None = None
    version: int = 0  # counts the lists that were in use


state = Part(ReferenceState)


def is_known_text_model(name: str) -> bool:
    """Whether the reference lists the model, by its name or by its name without the
    quantisation.
    """
    return _find(name) is not None


def get_text_model_multiplier(name: str) -> float:
    """Billions of parameters, by which kudos are reckoned; 1 for a model the reference does not
    list.
    """
    model = _find(name)
    return UNKNOWN_MULTIPLIER if model is None else model.parameters / PARAMETERS_PER_MULTIPLIER


def is_nsfw(name: str) -> bool:
    """Whether the reference marks the model as made for adult text; False for an unknown model."""
    model = _find(name)
    return model is not None and model.nsfw


def list_text_model_names() -> list[str]:
    """Every name of the reference, sorted."""
    return sorted(_get_models())


def refresh_text_models(source: str) -> int:
    """Replace the list by what `source`, a URL or a path, holds; the count of its names.

    Shape: an object of name to `{"parameters": integer, "nsfw"?: boolean}`; other keys are ignored.
    Errors: ModelReferenceError, and then the list in use stays.
    """
    models = parse_text_models(_read_source(source))
    _use(MappingProxyType(models))
    return len(models)


def use_bundled_text_models() -> None:
    """Forget a refreshed list."""
    _use(None)


def get_version() -> int:
    """Changes with every list that comes into use."""
    return state.get().version


def _use(models: Mapping[str, TextModel] | None) -> None:
    held = state.get()
    held.models = models
    held.version += 1


def parse_text_models(data: bytes) -> dict[str, TextModel]:
    """The models of a reference file; entries without a usable count of parameters are left out.

    Errors: ModelReferenceError for anything that is no object of models.
    """
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelReferenceError("The text model reference is not JSON.") from None
    if not isinstance(entries, dict):
        raise ModelReferenceError("The text model reference is not an object.")
    models = {
        name: model for name, entry in entries.items() if (model := _parse_entry(entry)) is not None
    }
    if not models:
        raise ModelReferenceError("The text model reference lists no models.")
    return models


def strip_alias(name: str) -> str:
    """The model's own name: a worker may brand what it serves as `model::owner#id`."""
    return name.partition("::")[0]


def strip_quantisation(name: str) -> str:
    """The name without the part that says how the weights were packed; unchanged when it has
    none.
    """
    return _QUANTISATION.sub("", name)


def _find(name: str) -> TextModel | None:
    models = _get_models()
    own_name = strip_alias(name)
    return models.get(own_name) or models.get(strip_quantisation(own_name))


def _get_models() -> Mapping[str, TextModel]:
    models = state.get().models
    if models is None:
        # Two threads may both read the file once; they read the same.
        models = MappingProxyType(
            dict(_with_backend_names(parse_text_models(BUNDLED_FILE.read_bytes())))
        )
        state.get().models = models
    return models


def _with_backend_names(models: Mapping[str, TextModel]) -> Iterator[tuple[str, TextModel]]:
    """Each model under its own name and as backends announce it: koboldcpp drops the
    organisation.
    """
    for name, model in models.items():
        yield name, model
        yield f"aphrodite/{name}", model
        yield f"koboldcpp/{name.rpartition('/')[2]}", model


def _parse_entry(entry: object) -> TextModel | None:
    if not isinstance(entry, dict):
        return None
    parameters = entry.get("parameters")
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters <= 0:
        return None
    return TextModel(parameters=parameters, nsfw=entry.get("nsfw") is True)


def _read_source(source: str) -> bytes:
    try:
        return (
            _download(source)
            if source.startswith(("http://", "https://"))
            else Path(source).read_bytes()
        )
    # ValueError: a host that cannot be decoded, also of a redirect.
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelReferenceError(
            f"The text model reference cannot be read: {type(error).__name__}."
        ) from error


def _download(url: str) -> bytes:
    data = bytearray()
    with httpx.stream(
        "GET", url, timeout=REFRESH_TIMEOUT_SECONDS, follow_redirects=True
    ) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > MAX_REFERENCE_BYTES:
                raise ModelReferenceError("The text model reference is too large.")
    return bytes(data)
