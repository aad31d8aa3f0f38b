"""Certificates that end are named before: two weeks, two days and an hour ahead, in `status`, log and metrics.

A SuperLink serves the certificate that it read at its start, whatever lies in its file later.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import logging
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509

from deploy import certificates
from deploy.inventory import Inventory
from fl_app.errors import UserError

log = logging.getLogger("corolla")

AHEAD = (datetime.timedelta(weeks=2), datetime.timedelta(days=2), datetime.timedelta(hours=1), datetime.timedelta(0))
"""The times before a certificate's end at which a warning is due; the last one is the end."""
RENEW = "`corolla cluster keys --renew CLUSTER.yaml`, then `down` and `up`"
# most seconds between two looks at the clock, which may jump
_LONGEST = 60.0


def stage(certificate: x509.Certificate) -> int:
    """Return the number of AHEAD that have come: 0 to 4, 4 after the end."""
    left = certificate.not_valid_after_utc - certificates.now()
    return sum(left <= ahead for ahead in AHEAD)


def named_by(options: Sequence[str]) -> list[Path]:
    """Return the files of certificates that options of flower-superlink or flower-supernode name."""
    return paths_in(options, "--ssl-ca-certfile", "--ssl-certfile", "--root-certificates")


def paths_in(options: Sequence[str], *names: str) -> list[Path]:
    """Return the paths that options with these names have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, type=Path)
    return [path for path in vars(parser.parse_known_args(options)[0]).values() if path is not None]


def watch(paths: Iterable[Path], sleep: Callable[[float], object] | None = None) -> None:
    """Log a warning for each certificate when its time has come, in a thread of its own.

    paths: files of certificates, read once, now. A file without one is left to those that use it. One that is not valid
    yet is named at once. sleep: for tests.
    """
    watched: dict[str, x509.Certificate] = {}
    for path in paths:
        try:
            found = certificates.read_certificates(path)
        except UserError as error:
            log.warning("%s", error)
            continue
        watched |= {f"{path}, number {k + 1}" if k else str(path): one for k, one in enumerate(found)}
    for name, one in watched.items():
        if one.not_valid_before_utc > certificates.now():
            log.warning("certificate %s %s", name, certificates.expiry_warning(one))
    if watched:
        run = functools.partial(_watch, watched, sleep or threading.Event().wait)
        threading.Thread(target=run, daemon=True, name="certificates").start()


def _watch(watched: Mapping[str, x509.Certificate], sleep: Callable[[float], object]) -> None:
    told = dict.fromkeys(watched, 0)
    while min(told.values()) < len(AHEAD):
        for name, certificate in watched.items():
            if (now := stage(certificate)) > told[name]:
                told[name] = now
                log.warning("certificate %s %s; %s", name, certificates.expiry_warning(certificate), RENEW)
        sleep(_until_next(watched.values()))


def _until_next(watched: Iterable[x509.Certificate]) -> float:
    """Return the seconds until a next warning is due, at most _LONGEST."""
    left = [each.not_valid_after_utc - certificates.now() - ahead for each in watched for ahead in AHEAD]
    return min([each.total_seconds() for each in left if each > datetime.timedelta(0)] + [_LONGEST])


def warnings(inventory: Inventory) -> list[str]:
    """Return a warning if the certificate that a running cluster's SuperLink shows has expired or is about to.

    After a renewal it still shows the old one until it is started again. One that is the file's is not named twice.
    """
    shown = served("127.0.0.1", inventory.superlink.control_port)
    file = Path(inventory.keys) / certificates.SERVER
    if shown is None or (file.is_file() and certificates.read_certificate(file) == shown):
        return []
    expires = certificates.expiry_warning(shown)
    again = "`down` and `up` show the renewed one"
    return [f"warning: the SuperLink shows a certificate that {expires}; {again}"] if expires else []


def served(host: str, port: int, seconds: float = 5) -> x509.Certificate | None:
    """Return the certificate that a server shows, trusted or not; None if there is no answer."""
    try:
        return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port), timeout=seconds).encode())
    except (OSError, ValueError):
        return None
