"""Sums that reveal no summand: fixed point in Z_2^32, and pairwise masks that cancel in the sum.

Client i sends y_i = x_i + sum_{j > i} PRG(k_ij) - sum_{j < i} PRG(k_ij) over the members j of its group, modulo 2^32.
Only i and j know k_ij. It belongs to one attempt at one round. In the sum over the group the masks cancel. If one
member is missing, the rest is uniformly random. Integer sums do not depend on their order, so they are equal on all
machines.

x_i = rint(2^s a_i w_i) with |w_i| <= R. The clients' weights a_i sum to N over all N clients of the attempt. s is
chosen such that every sum lies in [-2^30, 2^30]. Masks that do not cancel leave words of which half lie outside, so
that `decode` notices. R is the key `private-range` for weights, and BUFFERS_TIMES as much for BatchNorm statistics.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, without its second
masks: no mask is ever revealed, because an attempt that loses a client is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fl_app.wire import GROUP_MIN

Words = NDArray[np.uint32]

# BatchNorm's variances are larger than weights: their range is this multiple of the weights' range.
BUFFERS_TIMES = 64.0
_BITS = 30
# Words in a chunk: a chunk of the sum and one of a mask fit the cache.
_CHUNK = 1 << 18


def derived(secret: bytes, *labels: object) -> bytes:
    """Return 32 bytes derived from a secret and from labels of their purpose (HKDF-SHA256).

    Distinct labels give unrelated bytes.
    """
    info = b"".join(len(word).to_bytes(4, "big") + word for word in (str(label).encode() for label in labels))
    return HKDF(hashes.SHA256(), 32, salt=b"corolla", info=info).derive(secret)


def scale(num_clients: int, limit: float) -> int:
    """Return s, the fraction's bits: 2^s * limit * num_clients <= 2^30."""
    return _BITS - math.ceil(math.log2(limit * num_clients))


def encode(values: NDArray[np.float32], weight: float, num_clients: int, limit: float) -> Words:
    """Return rint(2^s * weight * values) modulo 2^32, uint32 [n].

    values: float32 [n] within +-limit. weight: in [0, num_clients]. Raises ValueError for values that are not finite or
    beyond the limit, and for weights out of range.
    """
    if not 0 <= weight <= num_clients:
        raise ValueError(f"weight must be in [0, {num_clients}], got {weight}")
    if not np.isfinite(values).all():
        raise ValueError(f"values must be finite, got {np.count_nonzero(~np.isfinite(values))} that are not")
    if beyond := int(np.count_nonzero(np.abs(values) > limit)):
        raise ValueError(f"values must be within +-{limit:g}, got {beyond} of {values.size} that are not")
    scaled = values.astype(np.float64)
    scaled *= weight * 2.0 ** scale(num_clients, limit)
    return np.rint(scaled, out=scaled).astype(np.int64).astype(np.uint32)


def decode(total: Words, weight: float, num_clients: int, limit: float) -> NDArray[np.float32]:
    """Return the weighted mean that a sum of encoded values represents, float32 [n].

    total: uint32 [n], modulo 2^32. weight: the sum of the summands' weights. Raises ValueError if a value is too large
    for a sum of encoded values.
    """
    signed = total.view(np.int32)
    # rounding adds half a unit per summand
    bound = 2.0 ** scale(num_clients, limit) * limit * weight + num_clients
    if signed.size and max(int(signed.max()), -int(signed.min())) > bound:
        outside = int(np.count_nonzero(np.abs(signed.astype(np.int64)) > bound))
        raise ValueError(f"{outside} of {signed.size} values are beyond what {num_clients} clients can sum up to")
    return (signed / (2.0 ** scale(num_clients, limit) * weight)).astype(np.float32)


def mask(words: Words, client_id: int, keys: Mapping[int, bytes]) -> None:
    """Add a client's pairwise masks, in place.

    words: uint32 [n]. keys: 32 bytes by the id of every other member of its group, for this attempt only. Raises
    ValueError for a group of fewer than three, or one in which the client is its own partner.
    """
    if len(keys) + 1 < GROUP_MIN or client_id in keys:
        raise ValueError(f"a sum needs {GROUP_MIN} different members, got client {client_id} and {sorted(keys)}")
    streams = [(j > client_id, _stream(key)) for j, key in sorted(keys.items())]
    zeros, buffer = bytes(4 * _CHUNK), bytearray(4 * _CHUNK + 16)
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        for added, stream in streams:
            stream.update_into(zeros[: 4 * part.size] if part.size < _CHUNK else zeros, buffer)
            pad = np.frombuffer(buffer, "<u4", part.size)
            (np.add if added else np.subtract)(part, pad, out=part)


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()


def stream(key: bytes, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of a key's pseudorandom stream.

    The stream is AES-128 in counter mode. The first 16 bytes of the key are the AES key, the other 16 are the initial
    counter.
    """
    return _stream(key).update(bytes(nbytes))
