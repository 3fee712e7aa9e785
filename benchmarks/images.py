# SPDX-License-Identifier: AGPL-3.0-or-later
"""How much longer a chat request with 20 images of 1 MiB takes than decoding and encoding the same
images alone.

Run by hand: `dev.py bench images [--rounds 3]`. The aim is a ratio of at most 1.3, and never more
than two images decoded at a time in one process.
"""

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks._bodies import MODEL
from benchmarks._http import Connection, Timings
from benchmarks._stack import make_account, own_database, running_api
from horde._image_helper import convert

IMAGE_COUNT = 20
IMAGE_BYTES = 1024 * 1024
REQUESTS_AT_ONCE = 4
POLL_SECONDS = 0.02


def build_photo(seed: int) -> bytes:
    """A JPEG of nearly 1 MiB: noise over a gradient, about as hard as a photo of three million
    pixels.
    """
    noise = Image.effect_noise((2000, 1500), 20 + seed % 3)
    gradient = Image.linear_gradient("L").resize((2000, 1500))
    photo = Image.merge("RGB", [Image.blend(noise, gradient, share) for share in (0.3, 0.5, 0.7)])
    best = b""
    for quality in range(50, 100, 3):
        output = io.BytesIO()
        photo.save(output, "JPEG", quality=quality)
        if output.tell() > IMAGE_BYTES:
            break
        best = output.getvalue()
    return best


def build_request(photos: list[bytes]) -> dict[str, Any]:
    """One user message of all the images."""
    parts = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"},
        }
        for photo in photos
    ]
    text = {"type": "text", "text": "What is in these?"}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [text, *parts]}],
        "max_tokens": 64,
    }


def build_pop() -> dict[str, Any]:
    """A worker that sees, with room for every image."""
    return {
        "name": "benchmark worker",
        "models": [MODEL],
        "bridge_agent": "Horde Bridge:1:here",
        "max_length": 512,
        "max_context_length": 4096,
        "chat_jobs": True,
        "chat_features": ["prompt_overflow_refused", "vision"],
        "chat_limits": {"max_context_length": 32768, "max_length": 1024},
        "model_id": MODEL,
        "image_transports": ["url"],
    }


def measure_alone(photos: list[bytes]) -> float:
    """Seconds to decode and encode the images one after the other, in this process."""
    started = time.perf_counter()
    for photo in photos:
        if convert(photo)[:1] != b"J":
            raise RuntimeError("the benchmark's own image is refused")
    return time.perf_counter() - started


def list_children(process_id: int) -> list[int]:
    """Processes below one, by the kernel's table."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == process_id:
            child = int(folder.name)
            found += [child, *list_children(child)]
    return found


def count_decoding(process_id: int) -> int:
    """Image helpers of an API that are at work: each decodes one image at a time."""
    count = 0
    for child in list_children(process_id):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        count += b"_image_helper" in command
    return count


def read_peak_mebibytes(process_id: int) -> int:
    """The most memory that one process of an API held at a time, helpers left out."""
    peaks = [0]
    for child in list_children(process_id):
        try:
            if b"_image_helper" not in Path(f"/proc/{child}/cmdline").read_bytes():
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
                peaks += [
                    int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")
                ]
        except OSError:
            continue
    return max(peaks)


def main() -> None:
    """Print the times, their ratio, the most images decoded at once, and the memory."""
    parser = argparse.ArgumentParser(prog="dev.py bench images", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--images", type=int, default=IMAGE_COUNT, help="of a request")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    options = parser.parse_args()
    photos = [build_photo(seed) for seed in range(options.images)]
    body = build_request(photos)
    with (
        own_database(os.environ["DATABASE_URL"]) as environment,
        tempfile.TemporaryDirectory() as folder,
    ):
        account = make_account(environment, "benchmark", "--trusted", "--kudos", "1000000")
        with running_api(environment, Path(folder) / "api.log", processes=1, threads=8) as api:
            timings = Timings()
            clients = [
                Connection(api.port, account.api_key, timings) for _ in range(REQUESTS_AT_ONCE)
            ]
            clients[0].call("pop", "POST", "/generate/text/pop", build_pop())
            clients[0].call("warm", "POST", "/generate/chat/async", build_request(photos[:1]))
            alone = min(measure_alone(photos) for _ in range(options.rounds))
            for _ in range(options.rounds):
                clients[0].call("one", "POST", "/generate/chat/async", body)
            threads = [
                threading.Thread(
                    target=client.call, args=("many", "POST", "/generate/chat/async", body)
                )
                for client in clients
            ]
            for thread in threads:
                thread.start()
            peak = 0
            while any(thread.is_alive() for thread in threads):
                peak = max(peak, count_decoding(api.process_id))
                time.sleep(POLL_SECONDS)
            figures = {
                "images": len(photos),
                "mebibytes": round(sum(map(len, photos)) / 1024 / 1024, 1),
                "alone_seconds": round(alone, 3),
                "request_seconds": round(min(timings.by_route["one"]), 3),
                "ratio": round(min(timings.by_route["one"]) / alone, 2),
                "decoded_at_once": peak,
                "peak_mebibytes": read_peak_mebibytes(api.process_id),
            }
    if options.json:
        json.dump(figures, sys.stdout)
        return
    print(f"{figures['images']} images, {figures['mebibytes']} MiB")
    print(f"decode and encode alone   {figures['alone_seconds']:7.3f} s")
    print(
        f"the whole request         {figures['request_seconds']:7.3f} s   {figures['ratio']} x,"
        " aim 1.3"
    )
    print(
        f"decoded at once           {figures['decoded_at_once']:7d}     of {REQUESTS_AT_ONCE}"
        " requests at once, aim 2"
    )
    print(
        f"memory of the API         {figures['peak_mebibytes']:7d} MiB after {REQUESTS_AT_ONCE}"
        " requests at once"
    )


if __name__ == "__main__":
    main()
