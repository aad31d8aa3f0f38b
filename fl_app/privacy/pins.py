"""The list of all sites' keys that a site has agreed to: the first one that it used, until it accepts another.

`<site's own directory>/peers/<hash of the site's public half>` holds the SHA-256 of the list, as sites compare it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fl_app import foreign_files
from fl_app.errors import DeploymentError
from fl_app.files import lock, make_directory

_DIRECTORY = "peers"


def agreed(site: Path, own: str) -> str:
    """Return the SHA-256 of the list that a site has agreed to, "" before the first use.

    own: the hash of the site's public half. Raises UserError if the note cannot be read: a lost note must not make
    another list the first one.
    """
    path = site / _DIRECTORY / own
    try:
        return foreign_files.read_text(site, f"{_DIRECTORY}/{own}").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise DeploymentError(
            key="private", rule=f"the note on the list of all sites' keys cannot be read: {path}: {error}"
        ) from None


def accept(site: Path, own: str, listed: str) -> None:
    """Note the list that a site agrees to from now on. Raises OSError, and UserError if the note would lie elsewhere."""
    make_directory(site)
    foreign_files.write(site, f"{_DIRECTORY}/{own}", f"{listed}\n".encode())


def require(site: Path, own: str, peers: Path) -> None:
    """Raise UserError unless a site has agreed to a list of all sites' keys, or has used none before."""
    listed = hash_of(peers)
    try:
        make_directory(site / _DIRECTORY)
        with lock(site / _DIRECTORY / ".lock", wait=True):
            if not (before := agreed(site, own)):
                accept(site, own, before := listed)
    except OSError as error:
        raise DeploymentError(
            key="private", rule=f"the list of all sites' keys cannot be noted in {site}: {error.strerror}"
        ) from None
    if before != listed:
        raise DeploymentError(refusal(peers, listed, before))


def refusal(peers: Path, listed: str, before: str, accepting: str = "NAME") -> str:
    """Return the error about a list that the site has not agreed to. accepting: arguments of the command that accepts it."""
    return (
        f"private: {peers} has changed: its sha256 is {listed}, this site has agreed to {before}; ask the other sites, then "
        f"`corolla node peers accept {accepting}`"
    )


def hash_of(peers: Path) -> str:
    """Return the SHA-256 of a list of all sites' keys, by which sites compare their copies. Raises UserError."""
    try:
        return hashlib.sha256(peers.read_bytes()).hexdigest()
    except OSError as error:
        raise DeploymentError(
            key="private", rule=f"the list of all sites' keys cannot be read: {peers}: {error.strerror}"
        ) from None
