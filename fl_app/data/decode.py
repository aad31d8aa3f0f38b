"""Decoding of image files straight into memory-mapped arrays, by a few threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from fl_app.data.folder import Listing
from fl_app.data.prepared import Images
from fl_app.errors import UserError

DECODE_BATCH = 64


class _ColourFound(Exception):
    """An image is not grayscale where the first one was."""


def decode(directory: Path, train: Listing, test: Listing, image_size: int) -> None:
    """Decode image files straight into x_train.npy and x_test.npy; write the labels beside them.

    One channel if all images are grayscale, else three (RGB).
    """
    first = train[0][0]
    with _reading(first) as image:
        gray, (width, height) = _is_gray(image), image.size
    if not image_size and width != height:
        raise UserError(f"dataset: {first} has {width}x{height} pixels, not square; set image-size to resize and crop")
    side = image_size or width
    for channels in (1, 3) if gray else (3,):
        try:
            for name, listing in (("train", train), ("test", test)):
                np.save(directory / f"y_{name}.npy", np.array([label for _, label in listing], np.int64))
                shape = (len(listing), channels, side, side)
                out = np.lib.format.open_memmap(directory / f"x_{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
                _decode_into(out, [file for file, _ in listing], first if not image_size else None)
            return
        except _ColourFound:
            continue


def _decode_into(out: Images, files: list[Path], like: Path | None) -> None:
    """Fill out [n, C, S, S] with the images, by a few threads (PIL decodes without the interpreter lock)."""

    def batch(start: int) -> None:
        for i in range(start, min(start + DECODE_BATCH, len(files))):
            out[i] = _pixels(files[i], out.shape[1], out.shape[2], like)

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for _ in pool.map(batch, range(0, len(files), DECODE_BATCH)):
            pass  # in order, so that the first bad file is the one reported
    finally:
        pool.shutdown(cancel_futures=True)


def _pixels(file: Path, channels: int, side: int, like: Path | None) -> Images:
    """Return one image, uint8 [channels, side, side]; `like`: the image whose size all must have, None: resize."""
    with _reading(file) as image:
        if channels == 1 and not _is_gray(image):
            raise _ColourFound
        if image.mode.startswith("I"):  # 16 bits a pixel
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB")
        if like is None:
            image = _resize(image, side)
        if image.size != (side, side):
            width, height = image.size
            raise UserError(
                f"dataset: {file} has {width}x{height} pixels, expected {side}x{side} as {like}; set image-size to "
                "resize and crop"
            )
        pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _resize(image: Image.Image, side: int) -> Image.Image:
    """Scale the short side to `side` (bilinear, antialiased) and crop the centre."""
    width, height = image.size
    short = min(width, height)
    size = max(side, side * width // short), max(side, side * height // short)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return image.crop((left, top, left + side, top + side))


def _is_gray(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(file) as image:
            image.load()
            yield image
    except (UserError, _ColourFound):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(f"dataset: {file} cannot be read as an image ({error})") from error
