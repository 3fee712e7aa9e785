# SPDX-License-Identifier: AGPL-3.0-or-later
"""The program of the helper process that decodes strangers' images; run as a file, so it imports
nothing of this project.

Reads the bytes of an image and answers with a letter, and after `ENCODED` with the JPEG. See
`horde.image`, which starts it, and `horde.helper_process` for the framing.
"""

import copy
import io
import resource
import signal
import struct
import sys
import warnings
from typing import BinaryIO

from PIL import (
    Image,
    ImageCms,
    ImageColor,
    ImageFilter,
    ImagePalette,
    MpoImagePlugin,
    TiffImagePlugin,
)

READY, ENCODED, TOO_MANY_PIXELS, UNREADABLE = b"R", b"J", b"P", b"U"
LENGTH = struct.Struct(">I")
MAX_PIXELS = 3072 * 3072
MAX_SIDE = 2048
JPEG_QUALITY = 90
# Address space: the largest image that is let in takes a third of it.
MEMORY_BYTES = 1024 * 1024 * 1024
CPU_SECONDS = 5.0  # the largest image that is let in takes one
# What the library decodes by itself and fast; others make it run a program, read a file or guess at
# the content.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF")
# The library imports these in the middle of its work, when no file can be opened any more.
PRELOADED = (copy, ImageCms, ImageColor, ImageFilter, ImagePalette, MpoImagePlugin)
WHITE = (255, 255, 255)
ORIENTATION_TAG = 0x0112
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DRAFTED_MODES = ("L", "RGB", "CMYK")  # of a JPEG, which can be decoded at a fraction of its size


class TooManyPixels(Exception):
    """The header tells of more than is decoded."""


def convert(data: bytes) -> bytes:
    """The answer to one image. An image that the library fails on in any way is judged as
    unreadable, never raised.
    """
    try:
        return ENCODED + encode(normalise(open_image(data)))
    except TooManyPixels:
        return TOO_MANY_PIXELS
    except Exception:  # noqa: BLE001  a hostile image may break the library in any way
        return UNREADABLE


def open_image(data: bytes) -> Image.Image:
    """The image with its header read and nothing decoded."""
    check_size(*find_webp_size(data))
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_size(*image.size)
    if image.format == "PNG" and image.mode != "P":
        image.info.update(scale_transparent_color(image.info.get("transparency"), data[24]))
    # A tile of it may be larger than the whole.
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags = image.tag_v2
        check_size(tags.get(TiffImagePlugin.TILEWIDTH, 1), tags.get(TiffImagePlugin.TILELENGTH, 1))
    return image


def check_size(width: int, height: int) -> None:
    """Raises TooManyPixels, and ValueError for an image without any."""
    if width < 1 or height < 1:
        raise ValueError("no pixels")
    if width * height > MAX_PIXELS:
        raise TooManyPixels


def scale_transparent_color(color: object, depth: int) -> dict[str, int | tuple[int, ...]]:
    """The one transparent colour of a PNG in the eight bits that its pixels are brought to; nothing
    for a palette's.

    The library leaves it in the bits of the file, where it marks another colour or none.
    """

    def scale(value: int) -> int:
        return value >> 8 if depth == 16 else (value & (1 << depth) - 1) * 255 // ((1 << depth) - 1)

    if isinstance(color, tuple):
        return {"transparency": tuple(map(scale, color))}
    return {"transparency": scale(color)} if isinstance(color, int) else {}


def find_webp_size(data: bytes) -> tuple[int, int]:
    """The canvas of a WebP, for which the library would reserve memory before it tells the size;
    one pixel of other formats.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 1, 1
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return (
        int.from_bytes(data[26:28], "little") & 0x3FFF,
        int.from_bytes(data[28:30], "little") & 0x3FFF,
    )


def normalise(image: Image.Image) -> Image.Image:
    """The first frame, upright, RGB or with transparency RGBA, its longest side at most
    MAX_SIDE.
    """
    if image.format in ("JPEG", "MPO") and image.mode in DRAFTED_MODES:
        shrink(image)
    image.load()
    # now, since a TIFF is turned when it is loaded.
    transposition = TRANSPOSITIONS.get(read_orientation(image))
    plain = convert_mode(image)
    shrink(plain)
    return plain if transposition is None else plain.transpose(transposition)


def shrink(image: Image.Image) -> None:
    """Bring the longest side to at most MAX_SIDE, in place."""
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS, reducing_gap=2.0)


def read_orientation(image: Image.Image) -> int:
    """How the camera was held, by its own word; 1 when that is missing or broken, which spoils no
    image.
    """
    try:
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001  as above
        return 1
    return orientation if isinstance(orientation, int) else 1


def convert_mode(image: Image.Image) -> Image.Image:
    """RGB, or RGBA where something is transparent; 16 bits and more are brought to eight by their
    upper ones.
    """
    if image.mode.startswith("I"):
        # By way of "I", since the library computes with no 16 bits in the order of big machines.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif image.mode == "F":
        image = image.convert("L")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG on white, without anything else that came with it."""
    if image.mode == "RGBA":
        flat = Image.new("RGB", image.size, WHITE)
        flat.paste(image, mask=image.getchannel("A"))
        image = flat
    image.info.clear()
    output = io.BytesIO()
    image.save(output, "JPEG", quality=JPEG_QUALITY)
    return output.getvalue()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end."""
    answer(answers, READY)
    while length := requests.read(LENGTH.size):
        data = requests.read(LENGTH.unpack(length)[0])
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        converted = convert(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data
        answer(answers, converted)


def answer(answers: BinaryIO, content: bytes) -> None:
    """Send one answer."""
    answers.write(LENGTH.pack(len(content)))
    answers.write(content)
    answers.flush()


def shut_in() -> None:
    """Take from the process what decoding does not need: memory without end, files, connections."""
    Image.init()
    Image.new("RGB", (1, 1)).save(io.BytesIO(), "JPEG")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # what is open already


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of oddities in an image that is read all the same
    Image.MAX_IMAGE_PIXELS = None  # `check_size` is stricter, and its refusal has a name
    shut_in()
    serve(sys.stdin.buffer, sys.stdout.buffer)
