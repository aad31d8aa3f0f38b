"""Decoding of image files straight into memory-mapped arrays, by a few threads.

The image's mode decides how pixels become 8 bits (MODES). 16-bit images keep the upper 8 of the bits that the data set
uses (DEPTHS). Float images must lie in [0, 1] and are multiplied by 255. Palettes become colours. Transparency is
dropped. A mode without a rule is refused. Images are turned as their EXIF orientation states. Of several frames the first is taken.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fl_app import progress
from fl_app.data.prepared import Images, note
from fl_app.errors import DataError, UserError, counted

log = logging.getLogger("corolla")

Found = TypeVar("Found")

Listing = list[tuple[Path, int]]
"""Image files with their labels."""

DECODE_BATCH = 64

DEPTHS = (8, 10, 12, 14, 16)
"""Possible numbers of bits that the values of 16-bit files use: detectors have 10, 12 or 14 bits."""


# Pillow has no 16-bit form of these modes: it drops the lower 8 bits when it reads a file
_EIGHT_BITS_KEPT = ("RGB", "RGBA", "LA")
# a file that uses 12 bits or fewer of its 16 is left with at most this many values
_FEW_VALUES = 16
# an error names this many images that cannot be read
_SHOWN = 5


class _ColourFound(Exception):
    """An image is in colour, although the first image was grayscale."""


class _DamagedImage(UserError):
    """An image cannot be read or converted."""


class _DeepFound(Exception):
    """An image has 16 bits, but the number of bits that the data set uses is not known yet."""


def decode(directory: Path, train: Listing, test: Listing, image_size: int) -> None:
    """Decode image files straight into x_train.npy and x_test.npy, and write labels and remarks beside them.

    Images get one channel if all are grayscale, else three (RGB). Raises UserError naming a file that cannot be
    converted.
    """
    try:
        _decode(directory, train, test, image_size)
    except _DamagedImage:
        files = [file for file, _ in (*train, *test)]
        _refuse_damaged(files, [str(file) for file in files])
        raise


def _decode(directory: Path, train: Listing, test: Listing, image_size: int) -> None:
    first = train[0][0]
    with _reading(first) as image:
        gray, (width, height) = _rule(image)[0], image.size
    if not image_size and width != height:
        raise DataError(
            key="dataset", rule=f"{first} has {width}x{height} pixels, not square; set image-size to resize and crop"
        )
    side = image_size or width
    channels, depth = 1 if gray else 3, 0
    while True:
        animated: list[Path] = []
        try:
            for name, listing in (("train", train), ("test", test)):
                np.save(directory / f"y_{name}.npy", np.array([label for _, label in listing], np.int64))
                shape = (len(listing), channels, side, side)
                out = np.lib.format.open_memmap(directory / f"x_{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
                _reserve(directory / f"x_{name}.npy")
                files = [file for file, _ in listing]
                several = _decode_into(out, files, first if not image_size else None, depth)
                animated += [file for file, found in zip(files, several, strict=True) if found]
            note(directory, _frames_note([str(file) for file in animated]))
            return
        except _ColourFound:
            channels = 3
        except _DeepFound:
            largest = max(_in_threads(_largest, [file for file, _ in (*train, *test)]))
            depth = depth_of(largest)
            note(directory, [depth_note(largest)], bits=depth)


def _refuse_damaged(files: Sequence[Path | bytes], names: Sequence[str]) -> None:
    """Raise UserError naming the first of the images that cannot be read, and their number; unless all can be read."""

    def damage(k: int) -> str:
        try:
            with _reading(files[k], names[k], key="") as image:
                _rule(image)[1](image, DEPTHS[-1])
        except _DamagedImage as error:
            return str(error)
        return ""

    found = [text for text in _in_threads(damage, range(len(files))) if text]
    if len(found) > 1:
        more = [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines = [f"  {text}" for text in found[:_SHOWN]] + more
        raise DataError(key="dataset", rule=f"{len(found)} images cannot be read:\n" + "\n".join(lines))
    if found:
        raise DataError(key="dataset", rule=found[0])


def depth_of(largest: int) -> int:
    """Return the number of bits for values up to `largest`: the smallest of DEPTHS that holds them."""
    return next(depth for depth in DEPTHS if largest < 2**depth)


def depth_note(largest: int) -> str:
    """Return the remark about 16-bit images with values up to `largest`."""
    depth = depth_of(largest)
    return (
        f"16-bit images: values up to {largest} use {depth} bits; the upper 8 are kept (divided by {2 ** (depth - 8)})"
    )


def _frames_note(names: Sequence[str]) -> list[str]:
    """Return a line that counts the images with several frames; none if there are none. names: theirs."""
    if not names:
        return []
    has, whose = ("has", "its") if len(names) == 1 else ("have", "their")
    return [f"{counted(len(names), 'image')} {has} several frames, such as {names[0]}: {whose} first frame is taken"]


def _has_frames(image: Image.Image) -> bool:
    """Return whether an image has several frames or pages. A camera's previews (MPO) are none.

    Call it after the image is read: Pillow goes through all frames.
    """
    try:
        return getattr(image, "n_frames", 1) > 1 and image.format != "MPO"
    # of many kinds: a later frame is damaged. Only the first is taken, and it was read.
    except Exception:
        return True


def _largest(file: Path) -> int:
    """Return the largest value of a 16-bit image file, 0 for any other image."""
    with _reading(file) as image:
        return largest_value(image)


def largest_value(image: Image.Image) -> int:
    """Return the largest value of a 16-bit image, 0 for any other image. Raises ValueError as its rule does."""
    return int(_sixteen_bits(image).max()) if _rule(image)[1] is _upper_byte else 0


def as_array(names: Sequence[str], files: Sequence[Path | bytes]) -> tuple[Images, list[str]]:
    """Return images, uint8 [n, H, W] or [n, H, W, 3], all of one size, and remarks. The rules are those of image files.

    names: the images' names in errors. files: paths, or files' contents. Raises UserError naming an image that cannot
    be converted.
    """
    try:
        return _as_array(names, files)
    except _DamagedImage:
        _refuse_damaged(files, names)
        raise


def _as_array(names: Sequence[str], files: Sequence[Path | bytes]) -> tuple[Images, list[str]]:
    gray, largest = True, 0
    sizes: dict[tuple[int, int], str] = {}
    for name, file in zip(names, files, strict=True):
        with _reading(file, name) as image:
            gray, largest = gray and _rule(image)[0], max(largest, largest_value(image))
            sizes.setdefault(image.size, name)
    if len(sizes) > 1:
        (expected, like), (got, name) = list(sizes.items())[:2]
        raise DataError(
            key="dataset",
            rule=f"{name} has {got[0]}x{got[1]} pixels, expected {expected[0]}x{expected[1]} as {like}; "
            "resize it first",
        )
    found, animated = [], []
    for name, file in zip(names, files, strict=True):
        with _reading(file, name) as image:
            found.append(np.asarray(_rule(image)[1](image, depth_of(largest)).convert("L" if gray else "RGB")))
            animated += [name] if _has_frames(image) else []
    return np.array(found, np.uint8), [*([depth_note(largest)] if largest else []), *_frames_note(animated)]


def _reserve(path: Path) -> None:
    """Allocate a file's blocks, so that a full disk raises OSError here.

    Without this, writing to the memory map on a full disk would kill the process.
    """
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _decode_into(out: Images, files: list[Path], like: Path | None, depth: int) -> list[bool]:
    """Decode the images into `out` [n, C, S, S], and return which have several frames."""

    def fill(i: int) -> bool:
        out[i], several = _pixels(files[i], out.shape[1], out.shape[2], like, depth)
        return several

    return _in_threads(fill, range(len(files)))


def _in_threads(function: Callable[[Any], Found], items: Sequence[Any]) -> list[Found]:
    """Return a function's results for all items, from a few threads (PIL decodes without the interpreter lock)."""

    def batch(start: int) -> list[Found]:
        return [function(item) for item in items[start : start + DECODE_BATCH]]

    found: list[Found] = []
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        # results come in order, so that the first bad file is the one reported
        for results in pool.map(batch, range(0, len(items), DECODE_BATCH)):
            found += results
            progress.report("decoding images", len(found), len(items))
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _pixels(file: Path, channels: int, side: int, like: Path | None, depth: int) -> tuple[Images, bool]:
    """Return one image, uint8 [channels, side, side], and whether it has several frames.

    like: the first file, named in errors; None: resize to `side`.
    """
    with _reading(file) as opened:
        image, (gray, eight_bit) = opened, _rule(opened)
        if channels == 1 and not gray:
            raise _ColourFound
        if eight_bit is _upper_byte and not depth:
            raise _DeepFound
        image = eight_bit(image, depth).convert("L" if channels == 1 else "RGB")
        if like is None:
            image = _resize(image, side)
        if image.size != (side, side):
            width, height = image.size
            raise DataError(
                key="dataset",
                rule=f"{file} has {width}x{height} pixels, expected {side}x{side} as {like}; set image-size to "
                "resize and crop",
            )
        return _channels_first(image), _has_frames(opened)


def read_image(file: Path, shape: tuple[int, ...], *, resize: bool, bits: int = 0) -> Images:
    """Return one image in the form of a data set, uint8 [C, H, W].

    resize: whether to resize it to side H, as `image-size` does; otherwise it must have H x W pixels. bits: the bits
    that the data set's 16-bit images use; 0 if unknown. Raises UserError.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(
            key=file, rule=f"the model takes samples of {channels} channels, image files have 1 or 3; give an .npz file"
        )
    with _reading(file, key="") as image:
        gray, eight_bit = _rule(image)
        if channels == 1 and not gray:
            raise DataError(f"{file} is in colour, the model takes grayscale images")
        depth = depth_of(largest := largest_value(image))
        if bits and largest >= 2**bits:
            raise DataError(
                f"{file} must have values below {2**bits}, because the training images use {bits} bits, got {largest}"
            )
        if not bits and depth < DEPTHS[-1] and eight_bit is _upper_byte:
            raise DataError(
                f"{file} has 16 bits a pixel and uses {depth}, but the number that the training images used is not known here: "
                "save it with 8 bits, scaled as they were"
            )
        image = eight_bit(image, bits or depth).convert("L" if channels == 1 else "RGB")
        if resize:
            image = _resize(image, height)
        if image.size != (width, height):
            raise DataError(f"{file} has {image.size[0]}x{image.size[1]} pixels, the model takes {width}x{height}")
        return _channels_first(image)


def _channels_first(image: Image.Image) -> Images:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _resize(image: Image.Image, side: int) -> Image.Image:
    """Scale the short side to `side` (bilinear, antialiased) and crop the centre."""
    width, height = image.size
    short = min(width, height)
    size = max(side, side * width // short), max(side, side * height // short)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return image.crop((left, top, left + side, top + side))


# Modes ----------------------------------------------------------------------------------------------------------------


def _unchanged(image: Image.Image, depth: int) -> Image.Image:
    return image


def _upper_byte(image: Image.Image, depth: int) -> Image.Image:
    """Return the image with the upper 8 of `depth` bits."""
    return Image.fromarray((_sixteen_bits(image) >> (depth - 8)).astype(np.uint8))


def _sixteen_bits(image: Image.Image) -> NDArray[Any]:
    """Return integers [H, W]. Raises ValueError for 32-bit integers that do not fit into 16 bits."""
    pixels = np.asarray(image)
    if pixels.dtype.itemsize > 2 and (pixels.min() < 0 or pixels.max() > 0xFFFF):
        raise ValueError(f"32-bit integers must be in [0, 65535], got {pixels.min()} .. {pixels.max()}")
    return pixels


def _scaled(image: Image.Image, depth: int) -> Image.Image:
    """Return floats multiplied by 255, rounded. Raises ValueError unless they are in [0, 1]."""
    pixels = np.asarray(image)
    if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError(
            f"floats must be in [0, 1], got {pixels.min():g} .. {pixels.max():g}; save it with 8 or 16 bits"
        )
    return Image.fromarray(np.rint(pixels * np.float32(255)).astype(np.uint8))


Rule = tuple[bool, Callable[[Image.Image, int], Image.Image]]
"""(whether a mode is grayscale, function from an image and the bits it uses to an 8-bit image that PIL can convert)."""

MODES: dict[str, Rule] = {
    **dict.fromkeys(("1", "L", "LA"), (True, _unchanged)),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N", "I"), (True, _upper_byte)),
    "F": (True, _scaled),
    **dict.fromkeys(("P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV"), (False, _unchanged)),
}


def _rule(image: Image.Image) -> Rule:
    if image.mode not in MODES:
        raise ValueError(f"mode {image.mode} is not one of {', '.join(MODES)}")
    return MODES[image.mode]


def _turn(image: Image.Image) -> None:
    """Turn or mirror an image, in place, as its EXIF orientation states."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:
        # Pillow may raise anything for damaged EXIF data, which say nothing about the pixels
        log.debug("no EXIF orientation: %s", error)


@contextlib.contextmanager
def _reading(file: Path | bytes, name: str = "", key: str = "dataset: ") -> Iterator[Image.Image]:
    """Open an image from a file or from a file's content. Raises UserError if it cannot be read or converted."""
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            of_sixteen_bits = image.mode in _EIGHT_BITS_KEPT and ";16" in str(getattr(image, "tile", ""))
            image.load()
            if of_sixteen_bits and 0 < (brightest := int(np.asarray(image).max(initial=0))) < _FEW_VALUES:
                raise ValueError(
                    f"Pillow keeps the upper 8 of 16 bits a colour, here 0 .. {brightest}: save it with 8 bits a colour"
                )
            _turn(image)
            yield image
    except (UserError, _ColourFound, _DeepFound):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise _DamagedImage(f"{key}{name or str(file)} cannot be read as an image ({error})") from error
