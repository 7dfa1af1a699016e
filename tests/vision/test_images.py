"""Images that callers give: formats, sizes, broken files."""

import base64
import sys
import zlib
from io import BytesIO

import pytest

Image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install '.[vision]'")

from mlx_paged.generate.__main__ import main
from mlx_paged.vision import images


def opened(source):
    (found,) = images.opened([source])
    return found


def file_of(size: tuple[int, int], kind: str = "PNG", mode: str = "RGB") -> bytes:
    file = BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGBA"), ("PNG", "L"), ("JPEG", "RGB"), ("GIF", "P"), ("BMP", "RGB")]
)
def test_an_image_of_any_kind_has_three_channels(kind, mode):
    found = opened(file_of((5, 3), kind, mode))
    assert found.mode == "RGB" and found.size == (5, 3)


def test_an_image_is_turned_as_its_camera_says():
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (5, 3)).save(file, "JPEG", exif=exif)
    assert opened(file.getvalue()).size == (3, 5)


def test_a_large_image_is_refused_before_its_pixels_are_read(monkeypatch):
    content = file_of((10_000, 10_000), mode="1")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="10000 x 10000 pixels: expected at most 33554432"):
        opened(content)


@pytest.mark.parametrize("size", [(1, images.MAX_SIDE + 1), (images.MAX_SIDE + 1, 1)])
def test_a_long_strip_is_refused_before_its_pixels_are_read(monkeypatch, size):
    """Pillow has memory for each row, however short it is."""
    content = file_of(size, mode="1")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"images\[0\]: .*expected sides of at most 65535 pixels"):
        opened(content)


def test_more_pixels_than_pillow_opens_are_refused_too():
    content = bytearray(file_of((1, 1)))
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    with pytest.raises(ValueError, match=r"images\[0\]: expected at most 33554432 pixels"):
        opened(bytes(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"not an image", file_of((9, 9))[:45], file_of((9, 9), "TIFF"), "file.png", None],
)
def test_what_is_no_image_is_refused(content):
    with pytest.raises(ValueError, match=r"images\[0\]: .*expected a PNG, JPEG, WEBP, GIF or BMP"):
        opened(content)


def test_a_jpeg_of_many_scans_is_refused_before_they_are_read(monkeypatch):
    file = BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    assert opened(content).size == (64, 64)
    last = content[content.rindex(images.SCAN) : -2]
    many = content[:-2] + last * images.MAX_SCANS + content[-2:]
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"images\[0\]: expected a JPEG of at most 100 scans"):
        opened(many)


@pytest.mark.parametrize(
    ("last", "message"), [(file_of((6000, 6000), mode="1"), "6000 x 6000"), (b"", "cannot be read")]
)
def test_all_images_are_checked_before_pixels_are_read(monkeypatch, last, message):
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=rf"images\[2\]: {message}"):
        images.opened([file_of((9, 9)), file_of((9, 9)), last])


def test_too_many_bytes_are_refused(monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="11 bytes: expected at most 10"):
        opened(b"x" * 11)
    with pytest.raises(ValueError, match="expected at most 10 bytes"):
        images.of_base64("x" * 40, "image")


def test_a_data_url_has_the_bytes():
    url = "data:image/png;base64," + base64.b64encode(b"bytes").decode()
    assert images.of_data_url(url, "image") == b"bytes"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/a.png", "https://host/a.png", "file:///etc/passwd", "/etc/passwd", None,
        "data:text/plain;base64,eA==", "data:image/png,eA==", "data:image/png;base64,*", 5,
    ],
)  # fmt: skip
def test_no_other_url_is_read(url):
    with pytest.raises(ValueError, match=r"messages\[0\]: expected"):
        images.of_data_url(url, "messages[0]")


def test_without_mlx_vlm_the_flag_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(SystemExit) as ended:
        main(["--vision", "--prompt", "a"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "mlx-vlm" in line and "is missing: expected pip install '.[vision]'" in line
