# SPDX-License-Identifier: AGPL-3.0-or-later
"""llama.cpp's server as a process of its own: ``python -m devtools.llama_server MODEL.gguf --port
N``.

The ``xllamacpp`` wheel has the server but no command to start it.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import xllamacpp

SLOT_COUNT = 2  # requests answered at once, each with the model's full context
MOST_THREADS = 4  # the models are small: more threads wait for each other


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        description="Serve a GGUF model on loopback with OpenAI's routes."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--port", type=int, default=0, help="0 takes any free port; the address is printed"
    )
    parser.add_argument("--name", default="model", help="the model's name in /v1/models")
    arguments = parser.parse_args()

    # Blocked before the server makes its threads, or one of them would take the signal and die of
    # it.
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
    # 0: what the model was trained with, for every slot.
    parameters.n_ctx, parameters.n_parallel = 0, SLOT_COUNT
    parameters.cpuparams.n_threads = min(MOST_THREADS, os.cpu_count() or 1)
    parameters.ui, parameters.cache_ram_mib, parameters.verbosity = False, 0, 1
    return parameters


if __name__ == "__main__":
    sys.exit(main())
