# SPDX-License-Identifier: AGPL-3.0-or-later
"""A whole horde for clients: API, front and a worker that answers, and the clients themselves.

What people point at the front is installed when a test first asks (``devtools/clients.py``).
Without a registry those tests are skipped with a word, on a build server they fail.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from devtools import clients
from devtools.bootstrap import SetupError
from devtools.services import ServiceAddresses
from horde.oai.mapping import list_supported_parameters
from tests.acceptance._stack import (
    Account,
    Front,
    Horde,
    build_shared_environment,
    running_front,
    running_horde,
    wait_until,
)
from tests.clients._browser import SCHEMES, VIEWS, Scheme, View, Visits, running_browser
from tests.clients._people import People, make_people
from tests.clients._worker import MODEL, AnsweringWorker, running_worker


@dataclass
class Stack:
    """What a client needs to know, and what a test may look at."""

    horde: Horde
    front: Front
    client: Account
    worker: AnsweringWorker

    def build_environment(self) -> dict[str, str]:
        """The settings of a client's script. Bytecode is kept, since the libraries come without."""
        told = {
            "HORDE_URL": f"{self.front.url}/v1",
            "HORDE_KEY": self.client.key,
            "HORDE_MODEL": MODEL,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "ANONYMIZED_TELEMETRY": "False",
            "LANGSMITH_TRACING": "false",
            "AI_SDK_LOG_WARNINGS": "false",
        }
        dropped = (
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "OPENAI_API_KEY",
            "OPENAI_BASE_URL",
        )
        return {name: value for name, value in os.environ.items() if name not in dropped} | told

    def is_cancelled(self, request_id: str) -> bool:
        """Whether the horde gave the request up."""
        (outcome,) = self.horde.database.rows(
            "SELECT terminal_outcome FROM waiting_prompts WHERE id = %s", request_id
        )
        return outcome[0] == "cancelled"

    @contextlib.contextmanager
    def declaring(self, features: Sequence[str]) -> Iterator[None]:
        """The worker declares these features meanwhile.

        API and front remember for seconds what is served, so that both ends wait until it can be
        read: nothing of this reaches the next test.
        """
        before = self.worker.features
        self._declare(features)
        try:
            yield
        finally:
            self._declare(before)

    def _declare(self, features: Sequence[str]) -> None:
        self.worker.features = features
        wait_until(lambda: self._is_known_for(frozenset(features)))

    def _is_known_for(self, features: frozenset[str]) -> bool:
        """Whether the front offers the model with these features."""
        card = httpx.get(f"{self.front.url}/v1/models/{MODEL}").json()
        sees = "image" in card["architecture"]["input_modalities"]
        offers = card["supported_parameters"]
        return sees == ("vision" in features) and offers == list_supported_parameters(features)


@pytest.fixture(scope="package")
def stack(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A horde with its front and one worker. It ends with the package, since it shares the Redis of
    the process.
    """
    folder = tmp_path_factory.mktemp("clients")
    environment = build_shared_environment(service_urls, "clients")
    with contextlib.ExitStack() as running:
        horde = running.enter_context(running_horde(environment, folder))
        settings = {
            "HORDE_TITLE": "Test horde",
            "HORDE_URL": horde.api.url.removesuffix("/api"),
            "HORDE_REPOSITORY": "https://source.example",
            "HORDE_OAI_MODELS_CACHE_SECONDS": "0",  # what a test declared is not the next one's
        }
        front = running.enter_context(running_front(horde, folder, **settings))
        client, owner = horde.create_account("client"), horde.create_account("owner")
        with running_worker(horde.api.url, owner.key) as worker:
            yield Stack(horde, front, client, worker)


@pytest.fixture(scope="package")
def people(stack: Stack) -> People:
    """Who walks the pages."""
    return make_people(stack.horde)


@pytest.fixture(autouse=True)
def _forgive_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """The worker faults on demand, and after twenty in an hour it would be put into maintenance."""
    yield
    if "stack" in request.fixturenames:
        stack: Stack = request.getfixturevalue("stack")
        stack.horde.database.rows("UPDATE workers SET aborted_jobs = 0")


def require[Found](find: Callable[[], Found]) -> Found:
    """What is to be installed; without it a skip, or a failure on a build server."""
    try:
        return find()
    except SetupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def client_python() -> Path:
    """The interpreter with the Python libraries."""
    return require(clients.require_python)


@pytest.fixture(scope="package")
def node() -> tuple[Path, Path]:
    """Node, and the folder that a script has to lie in to find the JavaScript libraries."""
    return require(clients.require_node)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium. It ends with the module: no asyncio runs beside Playwright."""
    program = require(clients.require_browser)
    with running_browser(program, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def visits(browser: Browser) -> Iterator[Visits]:
    """Opens pages; at the end none may have complained or asked another server for something."""
    opened = Visits(browser)
    yield opened
    opened.close()


@pytest.fixture(scope="package")
def axe() -> str:
    """The script that finds barriers in a page, see ``list_barriers``."""
    return require(clients.require_axe).read_text()


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest) -> View:
    """Each size that a page is looked at in."""
    return VIEWS[request.param]


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    """Each colour scheme."""
    return request.param
