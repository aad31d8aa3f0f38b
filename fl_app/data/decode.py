"""Decoding of image files straight into memory-mapped arrays, by a few threads.

Pixels become 8 bits by the rule of the image's mode (MODES): 16 bits lose the lower eight, floats must lie in [0, 1] and are scaled
to 255, transparency is dropped. A mode without a rule is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from fl_app import progress
from fl_app.data.prepared import Images
from fl_app.errors import UserError

Listing = list[tuple[Path, int]]
"""Image files with their labels."""

DECODE_BATCH = 64


class _ColourFound(Exception):
    """An image is in colour, and the first one was grayscale."""


def decode(directory: Path, train: Listing, test: Listing, image_size: int) -> None:
    """Decode image files straight into x_train.npy and x_test.npy; write the labels beside them.

    One channel if all images are grayscale, else three (RGB). Raises UserError naming a file that cannot be converted.
    """
    first = train[0][0]
    with _reading(first) as image:
        gray, (width, height) = _rule(image)[0], image.size
    if not image_size and width != height:
        raise UserError(f"dataset: {first} has {width}x{height} pixels, not square; set image-size to resize and crop")
    side = image_size or width
    for channels in (1, 3) if gray else (3,):
        try:
            for name, listing in (("train", train), ("test", test)):
                np.save(directory / f"y_{name}.npy", np.array([label for _, label in listing], np.int64))
                shape = (len(listing), channels, side, side)
                out = np.lib.format.open_memmap(directory / f"x_{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
                _reserve(directory / f"x_{name}.npy")
                _decode_into(out, [file for file, _ in listing], first if not image_size else None)
            return
        except _ColourFound:
            continue


def _reserve(path: Path) -> None:
    """Allocate a file's blocks, so that a full disk is an OSError here. Under a memory map it would end the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _decode_into(out: Images, files: list[Path], like: Path | None) -> None:
    """Fill out [n, C, S, S] with the images, by a few threads (PIL decodes without the interpreter lock)."""

    def batch(start: int) -> None:
        for i in range(start, min(start + DECODE_BATCH, len(files))):
            out[i] = _pixels(files[i], out.shape[1], out.shape[2], like)

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        starts = range(0, len(files), DECODE_BATCH)
        # results come in order, so that the first bad file is the one reported
        for start, _ in zip(starts, pool.map(batch, starts), strict=True):
            progress.report("decoding images", min(start + DECODE_BATCH, len(files)), len(files))
    finally:
        pool.shutdown(cancel_futures=True)


def _pixels(file: Path, channels: int, side: int, like: Path | None) -> Images:
    """Return one image, uint8 [channels, side, side]. like: the image whose size all must have; None: resize them."""
    with _reading(file) as image:
        gray, eight_bit = _rule(image)
        if channels == 1 and not gray:
            raise _ColourFound
        image = eight_bit(image).convert("L" if channels == 1 else "RGB")
        if like is None:
            image = _resize(image, side)
        if image.size != (side, side):
            width, height = image.size
            raise UserError(
                f"dataset: {file} has {width}x{height} pixels, expected {side}x{side} as {like}; set image-size to "
                "resize and crop"
            )
        return _channels_first(image)


def read_image(file: Path, shape: tuple[int, ...], *, resize: bool) -> Images:
    """Return one image as a data set would hold it, uint8 [C, H, W].

    resize: to the side H, as `image-size` does; otherwise it must have H x W pixels. Raises UserError.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise UserError(
            f"{file}: the model takes samples of {channels} channels, image files have 1 or 3; give an .npz file"
        )
    with _reading(file, "") as image:
        gray, eight_bit = _rule(image)
        if channels == 1 and not gray:
            raise UserError(f"{file} is in colour, the model takes grayscale images")
        image = eight_bit(image).convert("L" if channels == 1 else "RGB")
        if resize:
            image = _resize(image, height)
        if image.size != (width, height):
            raise UserError(f"{file} has {image.size[0]}x{image.size[1]} pixels, the model takes {width}x{height}")
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


def _unchanged(image: Image.Image) -> Image.Image:
    return image


def _high_byte(image: Image.Image) -> Image.Image:
    """Take the upper eight of 16 bits; 32-bit integers must fit into 16."""
    pixels = np.asarray(image)
    if pixels.dtype.itemsize > 2 and (pixels.min() < 0 or pixels.max() > 0xFFFF):
        raise ValueError(f"32-bit integers must be in [0, 65535], got {pixels.min()} .. {pixels.max()}")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def _scaled(image: Image.Image) -> Image.Image:
    """Scale floats in [0, 1] to 255."""
    pixels = np.asarray(image)
    if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError(
            f"floats must be in [0, 1], got {pixels.min():g} .. {pixels.max():g}; save it with 8 or 16 bits"
        )
    return Image.fromarray(np.rint(pixels * np.float32(255)).astype(np.uint8))


Rule = tuple[bool, Callable[[Image.Image], Image.Image]]
"""Whether a mode is grayscale, and what makes 8 bits of it, which PIL converts to L or RGB."""

MODES: dict[str, Rule] = {
    **dict.fromkeys(("1", "L", "LA"), (True, _unchanged)),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N", "I"), (True, _high_byte)),
    "F": (True, _scaled),
    **dict.fromkeys(("P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV"), (False, _unchanged)),
}


def _rule(image: Image.Image) -> Rule:
    if image.mode not in MODES:
        raise ValueError(f"mode {image.mode} is not one of {', '.join(MODES)}")
    return MODES[image.mode]


@contextlib.contextmanager
def _reading(file: Path, key: str = "dataset: ") -> Iterator[Image.Image]:
    try:
        with Image.open(file) as image:
            image.load()
            yield image
    except (UserError, _ColourFound):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(f"{key}{file} cannot be read as an image ({error})") from error
