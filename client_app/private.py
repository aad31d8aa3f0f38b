"""A client's side of a private round (docs/privacy.md): mask the upload, or refuse if that would not hide it."""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass

import numpy as np

from fl_app.config import RunConfig
from fl_app.config.privacy import LARGEST_PRIVATE_RANGE
from fl_app.errors import UserError, counted
from fl_app.keys import Scalar
from fl_app.layout import NOTHING, Vector
from fl_app.privacy import masking, sketch
from fl_app.privacy.keyring import Keyring
from fl_app.privacy.masking import BUFFERS_TIMES, Words, derived
from fl_app.wire import GROUP_MIN, PRIVATE, SUM, Download, Upload, state_version

__all__ = ["Masker", "properties"]


def properties(keys: Keyring) -> dict[str, Scalar]:
    """Return a client's properties for private runs.

    These are the fingerprint of its list of keys, and the sketches' key, sealed for each client.
    """
    return {f"{PRIVATE}-list": keys.fingerprint, f"{PRIVATE}-sealed": ",".join(keys.seal())}


def tags(keys: Keyring, names: str) -> str:
    """Return tags of a client's names, one per client, separated by commas.

    Each uses the key that the two clients share. Two clients' tags of each other are equal if their names are. The
    server has none of these keys, so it cannot guess names.
    """
    found = keys.for_each("names")
    return ",".join(hmac.new(key, names.encode(), "sha256").hexdigest() for key in found)


@dataclass(frozen=True)
class Masker:
    """Masks one upload with this client's keys, for the partners that it shares masks with.

    weight: the client's weight in the sum. clients: the number of clients in the whole sum. limit: the largest absolute
    value of a parameter that fits. sealed: the sketches' key, encrypted by client `sealer`; "" where the method sends
    no masks.
    """

    keys: Keyring
    download: Download
    partners: tuple[int, ...]
    weight: float
    clients: int
    limit: float
    sketch_bits: int
    sealed: str
    sealer: int

    @classmethod
    def of(cls, download: Download, config: RunConfig, keys: Keyring) -> Masker:
        """Read the server's request. Raises UserError if the answer would not be hidden."""
        asked, me = download.method, keys.client_id
        try:
            members = [int(word) for word in str(asked[f"{PRIVATE}-members"]).split(",")]
            weight, clients = float(asked[f"{PRIVATE}-weight"]), int(asked[f"{PRIVATE}-clients"])
            sealed, sealer = str(asked.get(f"{PRIVATE}-sealed", "")), int(asked.get(f"{PRIVATE}-sealer", 0))
        except (KeyError, ValueError):
            raise UserError("private: the server does not name the clients to mask with") from None
        if len(set(members)) != len(members) or me not in members or not set(members) <= set(range(keys.num_clients)):
            raise UserError(f"private: the server's group does not fit client {me}: {members}")
        if len(members) < GROUP_MIN:
            raise UserError(
                f"private: the server asks for a sum of {counted(len(members), 'client')}, but only "
                f"{GROUP_MIN} or more hide each other"
            )
        if not (len(members) <= clients <= keys.num_clients and 0 < weight <= clients and math.isfinite(weight)):
            raise UserError(
                f"private: the server gives client {me} a weight of {weight:g} among {counted(clients, 'client')}"
            )
        partners = tuple(i for i in members if i != me)
        limit = config.private_range
        return cls(keys, download, partners, weight, clients, limit, config.private_sketch, sealed, sealer)

    def mask(self, upload: Upload) -> Upload:
        """Return the upload to send: the model in fixed point under masks, and the sketch of its mask.

        The method's own metrics are left out. Raises UserError if the method would send other arrays, or if the model
        does not fit the range of the fixed point.
        """
        if upload.extras:
            raise UserError(f"private: the method would send {', '.join(upload.extras)} without masks")
        params = self._fixed_point("parameters", upload.model.params, times=1.0)
        words = np.concatenate([params, self._fixed_point("statistics", upload.model.buffers, times=BUFFERS_TIMES)])
        round, attempt, experiment = self.download.round, self.download.attempt, self.download.experiment
        masking.mask(words, self.keys.client_id, self.keys.masks(self.partners, experiment, round, attempt))
        hidden = None
        if upload.mask is not None:
            d = upload.model.params.size
            key = derived(self.keys.open(self.sealed, self.sealer), "sketch", experiment, round, attempt)
            hidden = sketch.sketch(upload.mask, d, sketch.length(d, self.sketch_bits), key)
        return Upload(NOTHING, hidden, {SUM: words}, {PRIVATE: state_version(round, attempt)}, upload.num_examples)

    def _fixed_point(self, what: str, values: Vector, times: float) -> Words:
        """Encode values within `private-range` times a factor. Raises UserError that names the range they need."""
        try:
            return masking.encode(values, self.weight, self.clients, times * self.limit)
        except ValueError as error:
            raise UserError(f"private: the {what} cannot be sent: {error}{self._advice(values, times)}") from None

    def _advice(self, values: Vector, times: float) -> str:
        """Return the end of an error: the `private-range` that values need, a power of two as the server expects."""
        largest = float(np.abs(values).max()) / times
        if not self.limit < largest < math.inf:
            return ""
        needed = 2.0 ** math.ceil(math.log2(largest))
        if needed > LARGEST_PRIVATE_RANGE:
            return f"; no private-range holds them (at most {LARGEST_PRIVATE_RANGE:g}): scale inputs and targets"
        return f"; set private-range, which is {self.limit:g}, to {needed:g} or more"
