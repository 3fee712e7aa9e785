# SPDX-License-Identifier: AGPL-3.0-or-later
"""Images of every kind through the real helper, and images from hosts of every kind, on loopback
behind the project's seam.
"""

import base64
import io
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

import pytest
from PIL import Image

from horde import image
from horde.chat.image_urls import (
    MAX_IMAGE_URL_CHARACTERS,
    ImageRefused,
    estimate_data_url_bytes,
)
from horde.chat_contract import MAX_CHAT_IMAGE_BYTES
from horde.exceptions import ServiceUnavailable
from horde.image import (
    encode_chat_image,
    fetch_public_image,
    load_chat_image,
)
from horde.outbound import MAX_URL_CHARACTERS, Network, PublicAnswer, resolve_host
from horde.return_codes import ReturnCode


def test_an_image_is_asked_for_by_no_longer_url_than_anything_else() -> None:
    assert MAX_IMAGE_URL_CHARACTERS == MAX_URL_CHARACTERS


RED, WHITE = (200, 0, 0), (255, 255, 255)
LOOPBACK = ip_address("127.0.0.1")
UNREADABLE, TOO_MANY_PIXELS = (
    ReturnCode.SOURCE_IMAGE_UNREADABLE,
    ReturnCode.SOURCE_IMAGE_RESOLUTION_EXCEEDED,
)


def draw(
    mode: str, format_name: str, color: Any = 0, size: tuple[int, int] = (64, 32), **options: Any
) -> bytes:
    """A file of one colour."""
    output = io.BytesIO()
    Image.new(mode, size, color).save(output, format_name, **options)
    return output.getvalue()


def draw_frames(format_name: str, count: int) -> bytes:
    """A file of many frames, the first one red."""
    frames = [
        Image.new("RGB", (16, 16), RED if index == 0 else (0, index % 255, 0))
        for index in range(count)
    ]
    output = io.BytesIO()
    frames[0].save(output, format_name, save_all=True, append_images=frames[1:])
    return output.getvalue()


def encode(data: bytes) -> Image.Image:
    """The stored form, checked to be a plain JPEG."""
    stored = Image.open(io.BytesIO(encode_chat_image(data)))
    assert (stored.format, stored.mode) == ("JPEG", "RGB")
    stored.load()
    return stored


def is_near(pixel: Any, color: tuple[int, int, int]) -> bool:
    return all(abs(got - wanted) <= 4 for got, wanted in zip(pixel, color, strict=True))


def refusal_of(call: Callable[[], object]) -> ReturnCode:
    with pytest.raises(ImageRefused) as refused:
        call()
    return refused.value.rc


# --- the stored form
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "format_name", "color", "stored_color"),
    [
        ("RGB", "JPEG", RED, RED),
        ("RGB", "PNG", RED, RED),
        ("RGB", "WEBP", RED, RED),
        ("RGB", "AVIF", RED, RED),
        ("RGB", "BMP", RED, RED),
        ("RGB", "TIFF", RED, RED),
        ("RGB", "GIF", RED, RED),
        ("L", "JPEG", 90, (90, 90, 90)),
        ("1", "PNG", 1, WHITE),
        ("CMYK", "JPEG", (0, 0, 0, 0), WHITE),
        ("CMYK", "TIFF", (0, 0, 0, 255), (0, 0, 0)),
        ("I;16", "PNG", 0x8000, (128, 128, 128)),
        ("I;16", "TIFF", 0x8000, (128, 128, 128)),
        ("I;16B", "TIFF", 0x8000, (128, 128, 128)),
        ("I", "TIFF", 0x8000, (128, 128, 128)),
        ("F", "TIFF", 100.0, (100, 100, 100)),
        ("RGBA", "PNG", (9, 9, 9, 0), WHITE),
        ("RGBA", "PNG", (0, 0, 0, 128), (127, 127, 127)),
        ("RGBA", "WEBP", (9, 9, 9, 0), WHITE),
        ("RGBA", "AVIF", (9, 9, 9, 0), WHITE),
        ("LA", "PNG", (3, 0), WHITE),
    ],
)
def test_every_common_file_becomes_a_jpeg_on_white(
    mode: str, format_name: str, color: Any, stored_color: Any
) -> None:
    stored = encode(draw(mode, format_name, color))
    assert stored.size == (64, 32)
    assert is_near(stored.getpixel((32, 16)), stored_color)


def test_a_palette_with_transparency_is_flattened() -> None:
    picture = Image.new("P", (16, 8), 1)
    picture.putpalette([0, 0, 0, 255, 0, 0])
    for options in ({"transparency": bytes([255, 0])}, {"transparency": 1}):
        output = io.BytesIO()
        picture.save(output, "PNG", **options)
        assert is_near(encode(output.getvalue()).getpixel((4, 4)), WHITE)
    assert is_near(encode(draw("RGB", "PNG", RED, transparency=RED)).getpixel((4, 4)), WHITE)


def test_sixteen_bit_colours_keep_their_upper_bits() -> None:
    pixel = struct.pack(">3H", 0xC800, 0, 0x0101)
    assert is_near(encode(build_png(depth=16, kind=2, row=pixel * 8)).getpixel((1, 1)), RED)


@pytest.mark.parametrize(
    ("depth", "kind", "row", "transparent", "other"),
    [
        (1, 0, b"\xff", b"\0\1", b"\0\0"),
        (2, 0, b"\x55\x55", b"\0\1", b"\0\2"),
        (4, 0, b"\x11\x11\x11\x11", b"\0\1", b"\0\x0f"),
        (8, 0, b"\x22" * 8, b"\0\x22", b"\0\x23"),
        (16, 0, b"\x33\1" * 8, b"\x33\1", b"\0\x33"),
        (8, 2, b"\x22\0\1" * 8, b"\0\x22\0\0\0\1", b"\0\x22\0\0\0\2"),
        (16, 2, b"\x33\1" * 24, b"\x33\1" * 3, b"\0\x33" * 3),
    ],
)
def test_the_transparent_colour_of_a_png_is_white_at_every_depth(
    depth: int, kind: int, row: bytes, transparent: bytes, other: bytes
) -> None:
    opaque = build_png(depth=depth, kind=kind, row=row)
    assert is_near(
        encode(build_png(depth=depth, kind=kind, row=row, extra=b"tRNS" + transparent)).getpixel(
            (4, 4)
        ),
        WHITE,
    )
    assert encode_chat_image(
        build_png(depth=depth, kind=kind, row=row, extra=b"tRNS" + other)
    ) == encode_chat_image(opaque)


def build_png(*, depth: int, kind: int, row: bytes, extra: bytes | None = None) -> bytes:
    """A PNG of eight equal rows of eight pixels; `extra` is a chunk's type and data."""
    parts = [
        b"IHDR" + struct.pack(">IIBBBBB", 8, 8, depth, kind, 0, 0, 0),
        b"IDAT" + zlib.compress((b"\0" + row) * 8),
        b"IEND",
    ]
    if extra is not None:
        parts.insert(1, extra)
    return b"\x89PNG\r\n\x1a\n" + b"".join(build_chunk(part) for part in parts)


def build_chunk(content: bytes) -> bytes:
    """A PNG chunk of a type and its data."""
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))


@pytest.mark.parametrize(
    ("size", "stored_size"),
    [((3000, 1500), (2048, 1024)), ((100, 2049), (100, 2048)), ((2048, 1), (2048, 1))],
)
@pytest.mark.parametrize("format_name", ["JPEG", "PNG"])
def test_the_longest_side_is_at_most_2048(
    format_name: str, size: tuple[int, int], stored_size: tuple[int, int]
) -> None:
    assert encode(draw("RGB", format_name, RED, size)).size == stored_size


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_a_rotated_photo_is_stored_upright(format_name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera's top is at the right
    picture = Image.new("RGB", (64, 32), WHITE)
    picture.paste(RED, (0, 0, 32, 32))
    output = io.BytesIO()
    picture.save(output, format_name, exif=exif)
    stored = encode(output.getvalue())
    assert stored.size == (32, 64)
    assert is_near(stored.getpixel((16, 8)), RED)
    assert is_near(stored.getpixel((16, 56)), WHITE)
    assert not stored.getexif()


@pytest.mark.parametrize("format_name", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_a_thousand_frames_the_first_is_stored(format_name: str) -> None:
    assert is_near(encode(draw_frames(format_name, 1000)).getpixel((8, 8)), RED)


def test_of_the_pictures_in_a_phones_file_the_first_is_stored() -> None:
    assert is_near(encode(draw_frames("MPO", 3)).getpixel((8, 8)), RED)


def test_nothing_that_came_with_an_image_is_stored() -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    smuggled = (
        draw("RGB", "JPEG", RED, exif=exif, comment=b"secret comment")
        + b"PK\x03\x04secret archive<script>"
    )
    assert b"secret" in smuggled
    stored = encode_chat_image(smuggled)
    assert b"secret" not in stored
    assert len(stored) < 2000


def test_the_quality_of_the_jpeg_is_90() -> None:
    output = io.BytesIO()
    Image.new("RGB", (8, 8)).save(output, "JPEG", quality=90)
    assert encode(draw("RGB", "PNG", size=(8, 8))).quantization == Image.open(output).quantization


# --- what is no image, or too much of one
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_a_truncated_image_is_unreadable(format_name: str) -> None:
    noise = Image.effect_noise((320, 320), 90).convert("RGB")
    output = io.BytesIO()
    noise.save(output, format_name)
    data = output.getvalue()
    assert refusal_of(lambda: encode_chat_image(data[: len(data) // 2])) is UNREADABLE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\0" * 1000,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
    ],
)
def test_bytes_of_no_image_are_unreadable(data: bytes) -> None:
    assert refusal_of(lambda: encode_chat_image(data)) is UNREADABLE


@pytest.mark.parametrize("format_name", ["EPS", "PDF", "TGA", "PPM", "ICO", "PCX", "JPEG2000"])
def test_formats_off_the_list_are_unreadable(format_name: str) -> None:
    assert refusal_of(lambda: encode_chat_image(draw("RGB", format_name, RED))) is UNREADABLE


def test_a_file_that_the_library_would_run_a_program_for_runs_none(tmp_path: Any) -> None:
    mark = tmp_path / "ran"
    script = (
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({mark}) (w) file"
        " closefile\nshowpage\n%%EOF\n"
    )
    assert refusal_of(lambda: encode_chat_image(script.encode())) is UNREADABLE
    assert not mark.exists()


def build_tiled_tiff(*, tile: tuple[int, int]) -> bytes:
    """A grey picture of 16 pixels by the header, in one packed tile of any size."""
    content = zlib.compress(bytes(tile[0] * tile[1]))
    long, short = 4, 3
    entries = [
        *(
            (256, long, 16),
            (257, long, 16),
            (258, short, 8),
            (259, short, 8),
            (262, short, 1),
            (277, short, 1),
        ),
        *(
            (322, long, tile[0]),
            (323, long, tile[1]),
            (324, long, 8 + 2 + 10 * 12 + 4),
            (325, long, len(content)),
        ),
    ]
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + content


def test_a_tiled_tiff_is_read() -> None:
    assert encode(build_tiled_tiff(tile=(16, 16))).size == (16, 16)


WEBP_CANVAS = b"RIFF\xff\xff\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xfe\x3f\0\xfe\x3f\0" + bytes(40)
# Drawn by the test: each process that collects it would draw a gigapixel.
TOO_LARGE: dict[str, Callable[[], bytes]] = {
    "one column more": lambda: draw("1", "PNG", size=(3073, 3072)),
    "decompression bomb": lambda: draw("1", "PNG", size=(30_000, 30_000)),
    "gif": lambda: draw("L", "GIF", size=(4000, 4000)),
    "tiff": lambda: draw("1", "TIFF", size=(9000, 9000), compression="group4"),
    "tiff of one huge tile": lambda: build_tiled_tiff(tile=(4096, 4096)),
    "webp canvas": lambda: WEBP_CANVAS,
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_more_pixels_than_the_cap_are_refused_by_the_header(name: str) -> None:
    data = TOO_LARGE[name]()
    assert len(data) < MAX_CHAT_IMAGE_BYTES
    assert refusal_of(lambda: encode_chat_image(data)) is TOO_MANY_PIXELS


def test_exactly_the_cap_of_pixels_is_read() -> None:
    assert encode(draw("1", "PNG", 1, (3072, 3072))).size == (2048, 2048)


def build_scan_bomb() -> bytes:
    """A JPEG that repeats its last scan, each a pass over nine million pixels, until it is 5
    MiB.
    """
    picture = draw("L", "JPEG", size=(3072, 3072), progressive=True)
    scan = picture[picture.rindex(b"\xff\xda") : -2]
    return picture[:-2] + scan * ((MAX_CHAT_IMAGE_BYTES - len(picture)) // len(scan)) + b"\xff\xd9"


def build_comment_bomb() -> bytes:
    """A GIF whose comment comes byte by byte, which the library joins in quadratic time."""
    picture = draw("L", "GIF")
    start = picture.index(b"\x2c", 13 + 3 * (2 << (picture[10] & 7)))
    return picture[:start] + b"\x21\xfe" + b"\x01a" * 2_500_000 + b"\0" + picture[start:]


def build_tag_bomb() -> bytes:
    """A TIFF of 60,000 tags that each claim the same four million bytes."""
    size, count = 4_000_000, 60_000
    tags = b"".join(
        struct.pack("<HHII", 0x9000 + index % 5000, 7, size, 8) for index in range(count)
    )
    return b"II*\0" + struct.pack("<I", size + 8) + bytes(size) + struct.pack("<H", count) + tags


@pytest.mark.parametrize("build", [build_scan_bomb, build_comment_bomb, build_tag_bomb])
def test_a_small_file_that_takes_forever_ends_and_others_are_read_meanwhile(
    build: Callable[[], bytes],
) -> None:
    bomb, ended = build(), threading.Event()
    assert len(bomb) <= MAX_CHAT_IMAGE_BYTES

    def defuse() -> None:
        with suppress(ImageRefused):
            encode_chat_image(bomb)
        ended.set()

    thread = threading.Thread(target=defuse, daemon=True)
    thread.start()
    assert is_near(encode(draw("RGB", "PNG", RED)).getpixel((1, 1)), RED)
    assert ended.wait(30)
    thread.join()


def test_a_bomb_in_the_words_of_a_camera_does_not_spoil_a_readable_image() -> None:
    picture, words = draw("RGB", "PNG", RED), build_chunk(b"eXIf" + build_tag_bomb()[:4_900_000])
    start = picture.index(b"IDAT") - 4
    assert is_near(encode(picture[:start] + words + picture[start:]).getpixel((1, 1)), RED)


def test_at_most_two_images_are_decoded_at_a_time() -> None:
    data, barrier = draw("RGB", "PNG", RED, (2000, 2000)), threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        encode_chat_image(data)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(image._decoders._idle) <= image.MAX_DECODING_COUNT == 2


def test_when_too_many_wait_the_horde_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image._decoders, "wait_seconds", 0.01)
    monkeypatch.setattr(image._decoders, "_slots", threading.BoundedSemaphore(1))
    image._decoders._slots.acquire()
    with pytest.raises(ServiceUnavailable):
        encode_chat_image(draw("RGB", "PNG"))


# --- data URLs
# --------------------------------------------------------------------------------------------------


def build_data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_a_web_address_has_a_longest_length() -> None:
    longest = "http://a/".ljust(65_536, "x")
    assert estimate_data_url_bytes(longest) is None
    with pytest.raises(ImageRefused) as refused:
        estimate_data_url_bytes(longest + "x")
    assert refused.value.rc is INVALID
    assert "65536" in refused.value.expectation


@pytest.mark.parametrize("size", range(6))
def test_the_size_of_a_data_url_is_known_by_its_length(size: int) -> None:
    url = build_data_url(b"x" * size)
    assert estimate_data_url_bytes(url) == size
    assert load_chat_image(url, deadline=0) == b"x" * size


@pytest.mark.parametrize(
    "prefix",
    [
        "data:image/png;base64,",
        "DATA:image/PNG;Base64,",
        "data:image/svg+xml;charset=utf-8;base64,",
    ],
)
def test_a_data_url_may_be_written_in_any_case_and_with_parameters(prefix: str) -> None:
    assert load_chat_image(prefix + "eHl6", deadline=0) == b"xyz"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:image/png,raw",
        "data:text/html;base64,eHl6",
        "data:image/png;base64",
        "ftp://host/a.png",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "horde-r2://somebody-elses_chat_0.jpg",
        "//host/a.png",
        "/etc/passwd",
        "http://",
        "https:///a.png",
        " http://host/a.png",
        "a" * 100_000,
    ],
)
def test_a_url_of_another_form_is_invalid(url: str) -> None:
    assert refusal_of(lambda: estimate_data_url_bytes(url)) is ReturnCode.SOURCE_IMAGE_URL_INVALID


@pytest.mark.parametrize(
    "payload", ["eHl", "e H l 6", "eHl6\n", "eH-_", "🙂🙂🙂🙂", "=", "====", "eHl6eH="]
)
def test_broken_base64_is_unreadable(payload: str) -> None:
    assert (
        refusal_of(lambda: load_chat_image(f"data:image/png;base64,{payload}", deadline=0))
        is UNREADABLE
    )


def test_a_data_url_over_the_cap_is_refused_without_decoding() -> None:
    url = build_data_url(bytes(MAX_CHAT_IMAGE_BYTES + 1))
    assert (
        refusal_of(lambda: load_chat_image(url, deadline=0))
        is ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED
    )


# --- hosts
# --------------------------------------------------------------------------------------------------


class Host(BaseHTTPRequestHandler):
    """Answers by its path: a picture, a status, redirects, too much, or with a declared length
    alone.
    """

    seen: list[str]
    picture = draw("RGB", "PNG", RED)
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.close_connection = True
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if kind == "redirect":
            self.answer(302, b"", Location=rest)
        elif kind == "hops":
            self.answer(
                301,
                b"x" * 10_000_000 if rest == "1" else b"",
                Location=f"/hops/{int(rest) - 1}" if rest != "1" else "/picture",
            )
        elif kind == "status":
            self.answer(int(rest), self.picture)
        elif kind == "declared":
            self.answer(200, b"", **{"Content-Length": "9999999"})
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                try:
                    self.wfile.write(bytes(65536))
                except OSError:
                    return
        else:
            self.answer(200, self.picture)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the client has read enough
            return

    # The base class's own name.
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def running_host() -> Iterator[tuple[str, list[str]]]:
    """The address of a host, under a name, and the paths it was asked for."""
    handler = type("OwnHost", (Host,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://pictures.example:{server.server_port}", handler.seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def host() -> Iterator[tuple[str, list[str]]]:
    with running_host() as started:
        yield started


@pytest.fixture
def open_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is this machine, and that counts as public."""
    network = Network(
        resolve=lambda _host, _port: [LOOPBACK], is_allowed=lambda address: address == LOOPBACK
    )
    monkeypatch.setattr(image.state.get(), "network", network)


def fetch(url: str, seconds: float = 10.0) -> bytes:
    return fetch_public_image(url, deadline=time.monotonic() + seconds)


INVALID, REFUSED = ReturnCode.SOURCE_IMAGE_URL_INVALID, ReturnCode.SOURCE_IMAGE_URL_REFUSED


@pytest.mark.usefixtures("open_network")
def test_a_picture_is_fetched_through_three_redirects_and_not_through_four(
    host: tuple[str, list[str]],
) -> None:
    address, seen = host
    for path in ("/picture", "/hops/1", "/hops/3", f"/redirect/{address}/picture"):
        assert fetch(address + path) == Host.picture
    assert load_chat_image(f"{address}/picture#part", deadline=time.monotonic() + 5) == Host.picture
    seen.clear()
    assert refusal_of(lambda: fetch(f"{address}/hops/4")) is INVALID
    assert seen == ["/hops/4", "/hops/3", "/hops/2", "/hops/1"]


@pytest.mark.usefixtures("open_network")
@pytest.mark.parametrize("status", [201, 204, 206, 304, 400, 401, 404, 500])
def test_an_answer_other_than_200_is_invalid(host: tuple[str, list[str]], status: int) -> None:
    assert refusal_of(lambda: fetch(f"{host[0]}/status/{status}")) is INVALID


@pytest.mark.usefixtures("open_network")
@pytest.mark.parametrize(
    "target",
    [
        "ftp://other.example/a",
        "file:///etc/passwd",
        "data:image/png;base64,eHl6",
        "http://[",
        "http://",
    ],
)
def test_a_redirect_to_what_is_no_web_address_is_invalid(
    host: tuple[str, list[str]], target: str
) -> None:
    assert refusal_of(lambda: fetch(f"{host[0]}/redirect/{target}")) is INVALID


@pytest.mark.usefixtures("open_network")
@pytest.mark.parametrize("path", ["/declared", "/endless"])
def test_a_body_is_read_to_the_cap_and_no_further(host: tuple[str, list[str]], path: str) -> None:
    assert refusal_of(lambda: fetch(host[0] + path)) is ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED


@pytest.mark.usefixtures("open_network")
def test_a_host_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "FETCH_SECONDS", 0.5)
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not stopped.wait(0.05):
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        started_at = time.monotonic()
        assert (
            refusal_of(lambda: fetch(f"http://pictures.example:{listener.getsockname()[1]}/"))
            is INVALID
        )
        assert time.monotonic() - started_at < 30
        stopped.set()
        thread.join()


@pytest.mark.usefixtures("open_network")
def test_a_fetch_is_bounded_in_bytes_and_in_time_by_phase_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(_method: str, _url: str, **bounds: Any) -> PublicAnswer:
        asked.append(bounds)
        return PublicAnswer(200, {}, b"x")

    monkeypatch.setattr(image, "send_public_request", answer)
    fetch_public_image("http://pictures.example/", deadline=time.monotonic() + 100)
    (bounds,) = asked
    assert (bounds["phase_seconds"], bounds["max_bytes"]) == (2.0, 5 * 1024 * 1024)
    assert 5 < bounds["total_seconds"] <= 10


def test_what_is_left_of_a_requests_time_bounds_a_fetch(host: tuple[str, list[str]]) -> None:
    assert refusal_of(lambda: fetch(f"{host[0]}/picture", seconds=0)) is INVALID
    assert host[1] == []


def test_half_of_a_processs_threads_fetch_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "FETCH_WAIT_SECONDS", 0.01)
    before = (image.state.get().fetching, image.state.get().network)
    try:
        image.configure(server_threads=4)
        with image._fetching(), image._fetching(), pytest.raises(ServiceUnavailable):
            fetch("http://pictures.example/")
    finally:
        image.state.get().fetching, image.state.get().network = before


class Door:
    """A listening socket on every address of this machine that counts who knocks."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]

    def count_knocks(self) -> int:
        """Connections that were made, whether or not anything was sent."""
        knocks = 0
        while True:
            try:
                self.listener.accept()[0].close()
            except BlockingIOError:
                return knocks
            knocks += 1


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    try:
        yield opened
    finally:
        opened.listener.close()


PRIVATE_SPELLINGS = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7F.0.0.1",
    "0177.0.0.1",
    "0177.0000.0000.0001",
    "017700000001",
    "%31%32%37.0.0.1",
    "127.0.0.1%20",
    "1\u2461\u2466.0.0.1",
    "\uff11\uff12\uff17.0.0.1",
    "127\u30020\u30020\u30021",
    "0",
    "0.0.0.0",
    "0x0",
    "localhost",
    "localhost.",
    "LOCALHOST",
    "a.localhost",
    "user@127.0.0.1",
    "1.1.1.1@127.0.0.1",
    "user:secret@127.0.0.1",
    "1.1.1.1:80@127.0.0.1",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:7f00:0001]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]",
    "[fe80::1%25lo]",
    "[::1%25lo]",
]


@pytest.mark.parametrize("host_text", PRIVATE_SPELLINGS)
def test_this_machine_is_not_reached_however_it_is_spelled(door: Door, host_text: str) -> None:
    assert refusal_of(lambda: fetch(f"http://{host_text}:{door.port}/")) is REFUSED
    assert door.count_knocks() == 0


@pytest.mark.parametrize(
    "address",
    [
        *(
            "10.0.0.1",
            "172.16.0.1",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.100.100.200",
            "192.0.0.1",
            "198.18.0.1",
        ),
        *(
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.88.99.1",
            "fd00:ec2::254",
            "fe80::1",
            "ff02::1",
            "fec0::1",
        ),
        *(
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::a9fe:a9fe",
            "::ffff:169.254.169.254",
            "2002:a9fe:a9fe::",
            "2001:db8::1",
            "5f00::1",
        ),
    ],
)
def test_a_name_of_an_address_that_is_not_public_is_refused_beside_public_ones(
    monkeypatch: pytest.MonkeyPatch, door: Door, address: str
) -> None:
    for addresses in (["1.1.1.1", address], [address]):
        resolve = Network(
            resolve=lambda _host, _port, found=addresses: [ip_address(text) for text in found]
        )  # type: ignore[misc]
        monkeypatch.setattr(image.state.get(), "network", resolve)
        assert refusal_of(lambda: fetch(f"http://metadata.example:{door.port}/")) is REFUSED
    assert door.count_knocks() == 0


def test_a_name_that_answers_differently_the_second_time_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch, host: tuple[str, list[str]], door: Door
) -> None:
    """A rebinding resolver: the checked address is asked, and a name is looked up once for each
    hop.
    """
    private = ip_address("127.0.0.2")
    answers = [[LOOPBACK], [private], [private]]
    lookups: list[str] = []

    def resolve(name: str, _port: int) -> list[Any]:
        lookups.append(name)
        return answers[len(lookups) - 1]

    network = Network(resolve=resolve, is_allowed=lambda address: address == LOOPBACK)
    monkeypatch.setattr(image.state.get(), "network", network)
    address, seen = host
    assert fetch(f"{address}/picture") == Host.picture
    assert lookups == ["pictures.example"]
    assert refusal_of(lambda: fetch(f"http://pictures.example:{door.port}/")) is REFUSED
    assert (len(lookups), door.count_knocks(), seen) == (2, 0, ["/picture"])


@pytest.mark.parametrize(
    "target",
    ["http://private.example:{port}/", "http://0x7f000002:{port}/", "//private.example:{port}/"],
)
def test_a_redirect_to_an_address_that_is_not_public_is_refused_unasked(
    monkeypatch: pytest.MonkeyPatch, host: tuple[str, list[str]], door: Door, target: str
) -> None:
    def resolve(name: str, port: int) -> Any:
        return (
            [LOOPBACK]
            if name == "pictures.example"
            else [ip_address("127.0.0.2")]
            if "private" in name
            else resolve_host(name, port)
        )

    monkeypatch.setattr(
        image.state.get(),
        "network",
        Network(resolve=resolve, is_allowed=lambda address: address == LOOPBACK),
    )
    address, seen = host
    assert (
        refusal_of(lambda: fetch(f"{address}/redirect/{target.format(port=door.port)}")) is REFUSED
    )
    assert (len(seen), door.count_knocks()) == (1, 0)


@pytest.mark.usefixtures("open_network")
@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example:99999/",
        "http://pictures.example:port/",
        "http://pictures.example:9/",  # nothing listens there
        "http://" + "a" * 70_000 + ".example/",
        "http://exa mple/",
        "http://\r\nHost: x/",
        "http://pictures.example/\r\nX: y",
        "http://..../",
        "http://" + ".".join(["a" * 70] * 3),
        "http://[::1",
        "http://🙂.example:9/",
    ],
)
def test_a_hostile_url_is_invalid_and_raises_nothing_else(url: str) -> None:
    assert refusal_of(lambda: fetch(url)) is INVALID


def test_a_host_that_is_no_host_reaches_nothing(door: Door) -> None:
    assert refusal_of(lambda: fetch(f"http://127.0.0.1%2F:{door.port}/")) is INVALID
    assert door.count_knocks() == 0


@pytest.mark.parametrize(
    "url", ["http://1.1.1.1/\r\nX: y", "http://1.1.1.1:99999/", "http://1.1.1.1/\ud800"]
)
def test_a_malformed_url_of_a_public_address_is_not_called_private(url: str) -> None:
    assert refusal_of(lambda: fetch(url)) is INVALID


@pytest.mark.usefixtures("open_network")
def test_a_proxy_of_the_environment_is_ignored(
    host: tuple[str, list[str]], door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{door.port}")
    assert fetch(f"{host[0]}/picture") == Host.picture
    assert door.count_knocks() == 0
