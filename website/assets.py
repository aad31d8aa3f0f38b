"""Browser files of other projects for the site: fetched once from the npm registry, checked against its hashes."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from fl_app.data.prepared import cache_directory
from fl_app.errors import UserError


@dataclass(frozen=True)
class Package:
    """A package of the npm registry.

    sha512: the archive's hash, as `dist.integrity` states it. inside: the folder of the files. wanted: selects files by
    name.
    """

    name: str
    version: str
    sha512: str
    inside: str
    wanted: Callable[[str], bool]

    @property
    def address(self) -> str:
        """The archive's address."""
        return f"https://registry.npmjs.org/{self.name}/-/{self.name}-{self.version}.tgz"


KATEX = Package(
    name="katex",
    version="0.16.22",
    sha512="XCHRdUw4lf3SKBaJe4EvgqIuWwkPSo9XoeO8GjQW94Bp7TWv9hNhzZjZ+OH9yf1UmLygb7DIT5GSFQiyt16zYg==",
    inside="package/dist/",
    wanted=lambda name: (
        name in ("katex.min.css", "katex.min.js", "contrib/auto-render.min.js")
        or (name.startswith("fonts/") and name.endswith(".woff2"))
    ),
)
"""Draws formulas. MIT licence."""

IFRAME_WORKER = Package(
    name="iframe-worker",
    version="1.0.4",
    sha512="roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==",
    inside="package/shim/",
    wanted=lambda name: name == "index.js",
)
"""Makes the search work in pages that are opened from a disk. MIT licence."""

PACKAGES = (KATEX, IFRAME_WORKER)


def files() -> dict[str, bytes]:
    """Return the content of each file by its path below the site's root.

    Archives are kept in the user's cache, so that a second build needs no network.
    Raises UserError if the registry cannot be reached or an archive has another hash.
    """
    found: dict[str, bytes] = {}
    for package in PACKAGES:
        with tarfile.open(fileobj=io.BytesIO(_archive(package))) as packed:
            for member in packed:
                name = member.name.removeprefix(package.inside)
                content = packed.extractfile(member) if package.wanted(name) else None
                if content is not None:
                    found[f"assets/{package.name}/{name}"] = content.read()
    return found


def _archive(package: Package) -> bytes:
    """Return a package's archive from the cache, else from the registry."""
    cache = cache_directory()
    kept = cache / f"{package.name}-{package.version}.tgz"
    if kept.is_file() and _sha512(known := kept.read_bytes()) == package.sha512:
        return known
    try:
        with urllib.request.urlopen(package.address, timeout=60) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise UserError(f"the site needs {package.address}, which cannot be read ({error})") from error
    if _sha512(content) != package.sha512:
        raise UserError(f"{package.address} has another SHA-512 than website/assets.py states: it was not used")
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(content)
    return content


def _sha512(content: bytes) -> str:
    return base64.b64encode(hashlib.sha512(content).digest()).decode()
