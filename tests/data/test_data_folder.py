"""Image folders: order, channels, sizes, and every error by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_app import data
from fl_app.data import decode
from fl_app.errors import DataError, UserError
from tests.facts import each_mentions, mentions, rejected


def write_folder(path: Path, sizes: dict[str, int], test_sizes: dict[str, int] | None = None, side: int = 8) -> Path:
    """Write random RGB images, one directory per class."""
    rng = np.random.default_rng(0)
    for split, counts in (("train", sizes), ("test", test_sizes or sizes)):
        (path / split).mkdir(parents=True)
        for name, count in counts.items():
            (path / split / name).mkdir()
            for i in range(count):
                pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
                Image.fromarray(pixels).save(path / split / name / f"{i:03}.png")
    return path


def test_folder_keeps_pixels_and_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"cat": 3, "ant": 2}, {"cat": 1})
    (folder / "train" / "ant" / "notes.txt").write_text("no image")
    (folder / "train" / ".hidden").mkdir()
    p = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert p.info.classes == ("ant", "cat") and p.y_train.tolist() == [0, 0, 1, 1, 1] and p.y_test.tolist() == [1]
    first = np.asarray(Image.open(folder / "train" / "ant" / "000.png")).transpose(2, 0, 1)
    assert np.array_equal(p.x_train[0], first) and p.x_train.shape == (5, 3, 8, 8)
    scaled = p.x_train / 255
    assert np.allclose(p.info.mean, scaled.mean((0, 2, 3))) and np.allclose(p.info.std, scaled.std((0, 2, 3)))
    other = data.prepare(f"folder:{folder}", tmp_path / "root", classes=("cat", "ant"))
    assert other.info.classes == ("cat", "ant") and other.key != p.key and other.y_test.tolist() == [0]


def test_folder_is_converted_again_when_its_directories_change(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    # a data directory inside the folder does not count as a change
    inside = folder / "prepared"
    key = data.prepare(f"folder:{folder}", inside).key
    assert data.prepare(f"folder:{folder}", inside).key == key
    (folder / "train" / "a" / "001.png").unlink()
    changed = data.prepare(f"folder:{folder}", inside)
    assert changed.key != key and changed.info.num_train == 3


def test_folder_channels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 3, "b": 3})
    for file in folder.rglob("*.png"):
        Image.open(file).convert("L").save(file)
    gray = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert gray.info.in_channels == 1 and len(gray.info.mean) == 1
    # one colour image, the last of all
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "test" / "b" / "002.png")
    colour = data.prepare(f"folder:{folder}", tmp_path / "root", force=True)
    assert colour.info.in_channels == 3
    assert np.array_equal(colour.x_train[:, 2], gray.x_train[:, 0])
    assert colour.x_test[-1].reshape(3, -1).mean(1).tolist() == [255, 0, 0]


def test_overwritten_files_are_noticed_by_who_looks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    source, root = f"folder:{folder}", tmp_path / "root"
    first = data.prepare(source, root, look=True)
    old = np.array(first.x_train)
    for file in folder.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(file)) // 2).save(file)
    assert np.array_equal(data.prepare(source, root).x_train, old) and not caplog.records
    again = data.prepare(source, root, look=True)
    assert again.key == first.key and np.array_equal(again.x_train, old // 2)
    assert mentions(caplog.text, "folder-images", "files have changed", "they were converted")
    assert np.array_equal(data.prepare(source, root, look=True).x_train, old // 2) and len(caplog.records) == 1


HALF = (128, 128, 128)
# per mode: how a pixel is written, what it becomes
PIXELS: dict[str, tuple[Any, Any]] = {
    "1": (1, 255),
    "L": (7, 7),
    "LA": ((7, 0), 7),
    "I;16": (40_000, 156),
    "I;16L": (40_000, 156),
    "I;16B": (40_000, 156),
    "I;16N": (40_000, 156),
    "I": (40_000, 156),
    "F": (0.5, 128),
    "P": (3, (30, 31, 32)),
    "PA": ((3, 9), (30, 31, 32)),
    "RGB": ((1, 2, 3), (1, 2, 3)),
    "RGBX": ((1, 2, 3, 4), (1, 2, 3)),
    "RGBA": ((1, 2, 3, 0), (1, 2, 3)),
    "RGBa": ((1, 2, 3, 255), (1, 2, 3)),
    "CMYK": ((127, 127, 127, 0), HALF),
    "YCbCr": (HALF, HALF),
    "HSV": ((0, 0, 128), HALF),
}
REFUSED = {"LAB": "mode LAB is not one of", "La": "mode La is not one of"}


def uniform(mode: str, value: Any) -> Image.Image:
    image = Image.new(mode, (8, 8), value)
    if mode in ("P", "PA"):
        image.putpalette([10 * k + j for k in range(4) for j in range(3)])
    return image


@pytest.mark.parametrize("mode", Image.MODES)
def test_every_mode_has_its_rule(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    value, becomes = PIXELS.get(mode, (0, None))
    # few formats can hold a given mode
    monkeypatch.setattr(Image, "open", lambda file: uniform(mode, value))
    if mode in REFUSED:
        with pytest.raises(DataError, match=f"train/a/000.png .*{REFUSED[mode]}"):
            data.prepare(f"folder:{folder}", tmp_path / "root")
        return
    prepared = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert prepared.info.in_channels == (1 if isinstance(becomes, int) else 3)
    assert {tuple(pixel) for pixel in prepared.x_train[0].reshape(prepared.info.in_channels, -1).T} == {
        (becomes,) if isinstance(becomes, int) else becomes
    }


def write_tiff(folder: Path, pixels: Any) -> Path:
    for file in folder.rglob("*.png"):
        Image.fromarray(pixels).save(file.with_suffix(".tif"))
        file.unlink()
    return folder


def test_float_images_are_scaled_or_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    prepared = data.prepare(
        f"folder:{write_tiff(write_folder(tmp_path / 'f', {'a': 1, 'b': 1}), ramp)}", tmp_path / "root"
    )
    assert prepared.x_train.shape == (2, 1, 8, 8) and np.array_equal(prepared.x_train[0, 0], np.rint(ramp * 255))
    for name, pixels, why in (
        ("large", ramp * 255, "floats must be in .0, 1., got 0 .. 255"),
        ("nan", ramp * np.nan, "floats must be in .0, 1."),
        ("long", (ramp * 1e6).astype(np.int32), "32-bit integers must be in .0, 65535., got 0 .. 1000000"),
    ):
        with pytest.raises(DataError, match=rf"a/000\.tif .*{why}"):
            data.prepare(
                f"folder:{write_tiff(write_folder(tmp_path / name, {'a': 1, 'b': 1}), pixels)}", tmp_path / "root"
            )


def test_image_size_resizes_and_crops(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the centre square
    Image.fromarray(wide).save(folder / "train" / "a" / "wide.png")
    p = data.prepare(f"folder:{folder}", tmp_path / "root", image_size=5)
    assert p.info.image_size == 5 and p.x_train.shape == (3, 3, 5, 5)
    assert p.x_train[1, :, :, 1:4].min() == 200


def folder_errors() -> dict[str, tuple[Any, str]]:
    def images(folder: Path, where: str, size: tuple[int, int]) -> None:
        Image.new("RGB", size).save(folder / where)

    return {
        "no test/": (lambda f: (f / "test").rename(f / "tset"), r"has no test/"),
        "no train/": (lambda f: (f / "train").rename(f / "tarin"), r"has no train/"),
        "empty class": (lambda f: (f / "train" / "c").mkdir(), r"class 'c' has no images in .*train/c"),
        "nested class": (
            lambda f: (f / "train" / "c" / "left").mkdir(parents=True),
            r"class 'c' has no images in .*train/c; its subfolders are not searched: left",
        ),
        "test only": (lambda f: (f / "test" / "c").mkdir(), r"test/c: class 'c' is not one of train/'s a, b"),
        "unreadable": (lambda f: (f / "test" / "b" / "bad.jpg").write_bytes(b"x"), r"test/b/bad.jpg cannot be read"),
        "truncated": (
            lambda f: (f / "train" / "a" / "t.png").write_bytes((f / "train" / "a" / "000.png").read_bytes()[:90]),
            r"train/a/t.png cannot be read",
        ),
        "size": (lambda f: images(f, "test/b/big.png", (9, 9)), r"test/b/big.png has 9x9 .* 8x8 .*set image-size"),
        "shape": (lambda f: images(f, "train/a/0.png", (9, 8)), r"train/a/0.png has 9x8 pixels, not square; set image"),
    }


@pytest.mark.parametrize("case", folder_errors())
def test_folder_errors(tmp_path: Path, case: str) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    change, message = folder_errors()[case]
    change(folder)
    with pytest.raises(UserError, match=message):
        data.prepare(f"folder:{folder}", tmp_path / "root")
    assert not list(tmp_path.glob("root/datasets/[!.]*")) and not list(tmp_path.glob("root/datasets/.*tmp*"))


@pytest.mark.parametrize(
    "classes, message",
    [
        (("a",), r"train/b: class 'b' is not one of classes a$"),
        (("a", "b", "c"), r"classes: .*train has no directory for class 'c'"),
    ],
)
def test_folder_classes_errors(tmp_path: Path, classes: tuple[str, ...], message: str) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    with pytest.raises(UserError, match=message):
        data.prepare(f"folder:{folder}", tmp_path / "root", classes=classes)


def test_missing_folder_and_single_class(tmp_path: Path) -> None:
    with rejected(DataError, "dataset", "nowhere", "no such file", "directory"):
        data.prepare(f"folder:{tmp_path / 'nowhere'}", tmp_path)
    with rejected(DataError, "dataset", "least two classes", "got a"):
        data.prepare(f"folder:{write_folder(tmp_path / 'one', {'a': 1})}", tmp_path)


# What is read, and what is not ----------------------------------------------------------------------------------------


def test_what_is_not_read_is_counted_by_reason(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    image = Image.open(folder / "train" / "a" / "000.png")
    kinds = {"photo.jfif": "jpeg", "PHOTO.JP2": "jpeg2000", "scan.tga": "tga", "page.jpe": "jpeg"}
    for name, kind in kinds.items():
        image.save(folder / "train" / "a" / name, format=kind)
    for where in ("train/a/notes.txt", "train/b/more.txt", "test/a/thumbs.db", "train/b/noname", "train/a/.DS_Store"):
        (folder / where).write_text("no image")
    (folder / "train" / "a" / "2021").mkdir()
    image.save(folder / "train" / "a" / "2021" / "one.png")
    image.save(folder / "train" / "beside.png")
    prepared = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert prepared.info.num_train == 8 and prepared.info.num_test == 4
    (line,) = prepared.info.remarks
    for words in (
        f"not read in {folder}: ",
        "2 .txt (no suffix of an image)",
        "1 .db (no suffix of an image)",
        "1 without a suffix (no suffix of an image)",
        "1 subfolder of a class folder (not searched: images must lie directly in ",
        "1 file beside the class folders",
        "1 hidden",
    ):
        assert words in line
    # from what is prepared already too
    assert data.prepare(f"folder:{folder}", tmp_path / "root").info.remarks == [line]
    assert (
        data.prepare(f"folder:{write_folder(tmp_path / 'all', {'a': 1, 'b': 1})}", tmp_path / "root").info.remarks == []
    )


@pytest.mark.parametrize("where", ["train/a/000.png", "test/b/000.jp2", "train/c"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, where: str) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    (folder / where).unlink(missing_ok=True)
    (folder / where).symlink_to(tmp_path / "gone.png")
    with rejected(DataError, "dataset", folder / where, f"link to {tmp_path / 'gone.png'}", "not there"):
        data.prepare(f"folder:{folder}", tmp_path / "root", look=True)


def test_a_link_that_is_no_image_may_lead_nowhere(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    (folder / "train" / "a" / "notes.txt").symlink_to(tmp_path / "gone.txt")
    (folder / "train" / "a" / "linked.png").symlink_to(folder / "train" / "b" / "000.png")
    prepared = data.prepare(f"folder:{folder}", tmp_path / "root", look=True)
    assert prepared.info.num_train == 5 and "1 .txt" in prepared.info.remarks[0]


def write_deep(folder: Path, largest: int) -> Path:
    """Replace a folder's images by 16-bit ones, of which one test image has the largest value."""
    for k, file in enumerate(sorted(folder.rglob("*.png"), reverse=True)):
        pixels = np.linspace(0, largest if k == len(list(folder.rglob("*.png"))) - 1 else largest // 2, 64)
        Image.fromarray(pixels.astype(np.uint16).reshape(8, 8)).save(file)
    return folder


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_images_are_turned_as_exif_states(tmp_path: Path) -> None:
    """Orientation 6: the picture is to be turned by 90 degrees clockwise."""
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    file = folder / "train" / "a" / "000.png"
    pixels = np.asarray(Image.open(file))
    plain = data.prepare(f"folder:{folder}", tmp_path / "root").x_train[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(file, exif=exif)
    turned = data.prepare(f"folder:{folder}", tmp_path / "root", force=True).x_train[0]
    assert np.array_equal(turned, np.rot90(plain, -1, (1, 2))) and not np.array_equal(turned, plain)
    assert np.array_equal(decode.read_image(file, turned.shape, resize=False), turned)
    (of_rows, *_), _ = decode.as_array(["a", "b"], [file, file.read_bytes()])
    assert np.array_equal(np.atleast_3d(of_rows).transpose(2, 0, 1), turned)
    # damaged EXIF data do not make an image unreadable
    Image.fromarray(pixels).save(file, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert np.array_equal(decode.read_image(file, turned.shape, resize=False), plain)


def test_all_damaged_images_are_named_or_counted_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 8, "b": 2})
    files = sorted((folder / "train" / "a").iterdir())
    for count, damaged in ((1, files[:1]), (3, [*files[1:3]]), (8, files[3:])):
        for file in damaged:
            file.write_bytes(b"no image")
        with pytest.raises(UserError) as caught:
            data.prepare(f"folder:{folder}", tmp_path / "root")
        first, *lines = str(caught.value).splitlines()
        if count == 1:
            assert mentions(first, "dataset", f"{files[0]} cannot be", "image") and not lines
            continue
        assert mentions(first, "dataset", f"{count} images cannot be", "read")
        for line, file in zip(lines, files[: min(count, 5)], strict=False):
            assert mentions(line, f"{file} cannot be", "image")
        assert lines[5:] == (["  and 3 more"] if count == 8 else []) and len(lines) == min(count, 6)
    (folder / "test" / "b" / "000.png").write_bytes(b"")
    with rejected(DataError, "dataset", "9 images cannot be", "read"):
        data.prepare(f"folder:{folder}", tmp_path / "root")
    with rejected(DataError, "dataset", "2 images cannot be", "read", "row 0 cannot", "row 2 cannot"):
        decode.as_array(["row 0", "row 1", "row 2"], [b"no", (folder / "test" / "a" / "001.png"), b"image"])


def test_images_with_several_frames_are_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    frames = [Image.fromarray(np.full((8, 8), 50 * k, np.uint8)) for k in range(1, 4)]
    files = [folder / "train" / "a" / "x.gif", folder / "test" / "b" / "x.tif"]
    for file in files:
        frames[0].save(file, save_all=True, append_images=frames[1:])
    prepared = data.prepare(f"folder:{folder}", tmp_path / "root", image_size=8)
    said = f"2 images have several frames, such as {files[0]}: their first frame is taken"
    assert prepared.info.remarks == [said] and (prepared.x_train[2] == 50).all()
    rows, notes = decode.as_array(["column i, row 0 of train"], [files[1].read_bytes()])
    assert (rows == 50).all()
    assert each_mentions(notes, ("1 image has several", "such as column i", "row 0 of train", "first frame"))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(("kind", "part"), [("GIF", 0.7), ("TIFF", 0.5)])
def test_an_image_whose_later_frames_are_damaged_is_read(kind: str, part: float) -> None:
    frames = [Image.fromarray(np.random.default_rng(k).integers(0, 256, (64, 64), np.uint8)) for k in range(3)]
    written = io.BytesIO()
    frames[0].save(written, kind, save_all=True, append_images=frames[1:])
    whole = written.getvalue()
    rows, notes = decode.as_array(["x"], [whole[: int(len(whole) * part)]])
    np.testing.assert_array_equal(rows, decode.as_array(["x"], [whole])[0])
    assert each_mentions(notes, ("1 image has several", "such as x", "first frame"))


@pytest.mark.parametrize(("largest", "bits"), [(200, 8), (1000, 10), (4095, 12), (4000, 12), (9000, 14), (40_000, 16)])
def test_sixteen_bit_images_use_the_bits_of_the_data(tmp_path: Path, largest: int, bits: int) -> None:
    folder = write_deep(write_folder(tmp_path / "images", {"a": 2, "b": 2}), largest)
    prepared = data.prepare(f"folder:{folder}", tmp_path / "root")
    pixels = np.concatenate([prepared.x_train, prepared.x_test])
    assert pixels.max() == largest >> (bits - 8) and prepared.info.in_channels == 1
    assert each_mentions(
        prepared.info.remarks,
        ("16-bit images", f"values up to {largest}", f"{bits} bits", "upper 8", f"(divided by {2 ** (bits - 8)})"),
    )


def test_few_bits_of_sixteen_in_colour_are_refused(tmp_path: Path) -> None:
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    def deep_rgb(largest: int) -> bytes:
        """A PNG of 16 bits a colour, as Pillow reads and cannot write it."""
        rows = b"".join(b"\0" + np.full((8, 3), largest, ">u2").tobytes() for _ in range(8))
        head = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    (folder / "train" / "a" / "000.png").write_bytes(deep_rgb(0xC000))
    assert data.prepare(f"folder:{folder}", tmp_path / "root").x_train[0].max() == 0xC0
    (folder / "train" / "a" / "000.png").write_bytes(deep_rgb(4095))
    with rejected(DataError, "dataset", "a/000.png cannot be", "read", "Pillow keeps", "8 of 16 bits a colour"):
        data.prepare(f"folder:{folder}", tmp_path / "root", force=True)


def test_a_single_image_of_few_bits_is_refused(tmp_path: Path) -> None:
    for largest in (60_000, 4000):
        Image.fromarray(np.full((8, 8), largest, np.uint16)).save(tmp_path / f"{largest}.png")
    assert decode.read_image(tmp_path / "60000.png", (1, 8, 8), resize=False).max() == 60_000 >> 8
    with rejected(DataError, "", "4000.png has 16", "uses 12", "number", "training images used"):
        decode.read_image(tmp_path / "4000.png", (1, 8, 8), resize=False)
