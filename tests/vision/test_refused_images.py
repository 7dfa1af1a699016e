"""Requests whose images are refused leave nothing behind."""

import base64
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: pip install '.[vision]'")

from PIL import Image

from mlx_paged.vision.images import MAX_IMAGES, MAX_SCANS, SCAN
from tests.support.commands.server_harness import live, only_model, post, wait_until
from tests.support.models import seeing_directory as tiny

NUM_REQUESTS, NUM_CLIENTS = 200, 4
WARM_UP = 3
"""So often each body is sent first, by several clients: glibc's arenas of the threads grow for some
time. Then one client sends them, because images that are decoded at once add up."""
MOST = 48 << 20
"""Bytes by which the second half of the requests may need more than the first one. Threads keep
some for what they allocate next; a decoded image of those below has up to 90 MB."""

STATM = Path("/proc/self/statm")


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def file_of(width, height, kind="PNG", mode="1", **options):
    file = BytesIO()
    Image.new(mode, (width, height)).save(file, kind, **options)
    return file.getvalue()


def chunk(name, content):
    checked = name + content
    return len(content).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")


def inflating(name, before):
    """A PNG with a chunk of text or of colors that has a thousandth of its 512 MB."""
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(512)) + packer.flush()
    own = tiny.png(1)
    at = own.index(b"IDAT") - 4
    return own[:at] + chunk(name, before + b"\0\0" + packed) + own[at:]


def of_many_scans():
    own = file_of(1024, 1024, "JPEG", "L", progressive=True)
    return own[:-2] + own[own.rindex(SCAN) : -2] * MAX_SCANS + own[-2:]


def of_size(width, height):
    """A PNG that only says that it is as large."""
    header = chunk(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\1\0\0\0\0")
    return tiny.png(1)[:8] + header + file_of(1, 1)[33:]


def part(content, url="data:image/png;base64,"):
    return {"type": "image_url", "image_url": {"url": url + base64.b64encode(content).decode()}}


def bodies():
    wide = file_of(5700, 5700, mode="RGB")
    jpeg = file_of(4000, 4000, "JPEG", "RGB")
    kinds = {
        "100 megapixels": [part(file_of(10_000, 10_000))],
        "3,600 megapixels": [part(of_size(60_000, 60_000))],
        "wide and truncated": [part(wide[: len(wide) // 2])],
        "in all too many pixels": [part(file_of(4000, 4000))] * 3,
        "broken JPEG": [part(jpeg[:20] + bytes(600) + jpeg[620:])],
        "truncated JPEG": [part(jpeg[: len(jpeg) // 2])],
        "truncated": [part(tiny.png(1)[:80])],
        "wrong type": [part(b"%PDF-1.4" + bytes(1 << 20))],
        "network": [part(b"", "http://127.0.0.1:1/a.png?")],
        "file": [part(b"", "file:///etc/hosts?")],
        "too many": [part(tiny.png(1))] * (MAX_IMAGES + 1),
        "inflating text": [part(inflating(b"zTXt", b"a"))],
        "inflating colors": [part(inflating(b"iCCP", b"a"))],
        "many scans": [part(of_many_scans())],
        "no base64": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}],
        "too long": [part(tiny.png(1)), {"type": "text", "text": "a" * 2000}],
    }
    return {
        name: {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        for name, parts in kinds.items()
    }


@pytest.mark.heavy
@pytest.mark.skipif(not STATM.exists(), reason="reads Linux's /proc")
def test_memory_stays_as_it_is_under_refused_images(tmp_path):
    every = bodies()
    with live("--model", str(tiny.make(tmp_path / "tiny")), "--vision") as server:

        def refused(name):
            status, _, answer = post(server, every[name], "/v1/chat/completions")
            assert status == 400, (name, answer)
            return resident()

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(refused, [*every] * WARM_UP))  # what is allocated once
            wait_until(lambda: not only_model(server).taken)
            active = mx.get_active_memory()
            names = [[*every][i % len(every)] for i in range(NUM_REQUESTS)]
        levels = [refused(name) for name in names]
        first, later = levels[: NUM_REQUESTS // 4], levels[-NUM_REQUESTS // 4 :]
        # An image of 50 MB comes and goes; what leaks stays at each level.
        assert min(later) - max(first) < MOST, [level >> 20 for level in levels]
        assert mx.get_active_memory() <= active
