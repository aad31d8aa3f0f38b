"""How long certificates still hold."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509

from fl_app.errors import UserError

WARNING_DAYS = 30


def now() -> datetime.datetime:
    """Return the time a certificate's end is compared with."""
    return datetime.datetime.now(datetime.UTC)


def days_left(certificate: x509.Certificate) -> float:
    """Return how many days a certificate still holds; negative if it has expired."""
    return (certificate.not_valid_after_utc - now()) / datetime.timedelta(days=1)


def words(certificate: x509.Certificate) -> str:
    """Say that a certificate has expired or is about to; "" if neither."""
    days, end = days_left(certificate), f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    if days < 0:
        return f"expired on {end}"
    return f"expires on {end}, in {int(days)} days" if days < WARNING_DAYS else ""


def read(path: Path) -> x509.Certificate:
    """Read a certificate. Raises UserError if the file holds none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"keys: {path} is not a certificate: {error}") from None
