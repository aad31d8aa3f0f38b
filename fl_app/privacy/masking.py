"""Sums that reveal no summand: fixed point in Z_2^64, and pairwise masks that cancel in the sum.

Client i sends y_i = x_i + sum_{j > i} PRG(k_ij) - sum_{j < i} PRG(k_ij) over the members j of its sum, modulo 2^64.
Only i and j can derive k_ij, and only from the same transcript of the attempt (transcript.py). In the sum over all
members the masks cancel. If one member is missing, or has another view, the rest is uniformly random. Integer sums do
not depend on their order, so they are equal on all machines.

x_i = rint(2^s a_i w_i) with |w_i| <= R, where client i computes its own weight 0 < a_i <= 1. The last word of x_i is
a_i itself, so the sum contains the weight that it must be divided by. s is chosen such that every sum of N clients lies
in [-2^62, 2^62]. Masks that do not cancel leave words of which half lie outside, so that `decode` notices. R is the key
`private-range` for weights, and BUFFERS_TIMES as much for BatchNorm statistics.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fl_app.layout import Model
from fl_app.privacy import secure_random
from fl_app.transport.wire import GROUP_MIN

Words = NDArray[np.uint64]

# BatchNorm's variances are larger than weights: their range is this multiple of the weights' range.
BUFFERS_TIMES = 64.0
_BITS = 62
# Words in a chunk: a chunk of the sum and one of a mask fit the cache.
_CHUNK = 1 << 17


def derived(secret: bytes, *labels: object) -> bytes:
    """Return 32 bytes derived from a secret and from labels of their purpose (HKDF-SHA256).

    Distinct labels give unrelated bytes.
    """
    info = b"".join(len(word).to_bytes(4, "big") + word for word in (str(label).encode() for label in labels))
    return HKDF(hashes.SHA256(), 32, salt=b"corolla", info=info).derive(secret)


def scale(num_clients: int, limit: float) -> int:
    """Return s, the fraction's bits: 2^s * limit * num_clients <= 2^62."""
    return _BITS - math.ceil(math.log2(limit * num_clients))


def length(model: Model) -> int:
    """Return the number of words that a model is sent in: one for each value, and one for the weight."""
    return model.params.size + model.buffers.size + 1


def encode(model: Model, weight: float, num_clients: int, limit: float) -> tuple[Words, bool]:
    """Return rint(2^s * weight * values) and the weight itself, modulo 2^64, uint64 [d + b + 1].

    Also return whether a value was clipped to its range, or was no number and became 0. weight: in (0, 1]. limit: of
    parameters. Raises ValueError for another weight.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"weight must be in (0, 1], got {weight}")
    words, clipped, start = np.empty(length(model), np.uint64), False, 0
    for values, bound in ((model.params, limit), (model.buffers, limit * BUFFERS_TIMES)):
        scaled = np.clip(values.astype(np.float64), -bound, bound)
        clipped = clipped or not np.array_equal(scaled, values)
        np.nan_to_num(scaled, copy=False)
        scaled *= weight * 2.0 ** scale(num_clients, bound)
        words[start : start + values.size] = np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)
        start += values.size
    words[start] = round(2.0 ** scale(num_clients, 1.0) * weight)
    return words, clipped


def decode(total: Words, d: int, num_clients: int, members: int, limit: float) -> Model:
    """Return the weighted mean that a sum of encoded models represents.

    total: uint64 [d + b + 1], modulo 2^64. members: the number of summands. Raises ValueError if a value is too large for
    a sum of this many encoded models.
    """
    weight = int(total[-1]) * 2.0 ** -scale(num_clients, 1.0)
    if not 0 < weight <= members:
        raise ValueError(f"the weights of {members} clients cannot sum up to {weight:g}")
    parts = []
    for words, bound in ((total[:d], limit), (total[d:-1], limit * BUFFERS_TIMES)):
        signed, unit = words.view(np.int64), 2.0 ** scale(num_clients, bound)
        # rounding adds half a unit per summand, and the weight's own rounding that much of the range
        most = unit * bound * weight * (1 + 2.0**-16) + members
        if signed.size and max(int(signed.max()), -int(signed.min())) > most:
            outside = int(np.count_nonzero(np.abs(signed.astype(np.float64)) > most))
            raise ValueError(f"{outside} of {signed.size} values are beyond what {members} clients can sum up to")
        parts.append((signed / (unit * weight)).astype(np.float32))
    return Model(*parts)


def mask(words: Words, client_id: int, keys: Mapping[int, bytes]) -> None:
    """Add a client's pairwise masks, in place.

    words: uint64 [n]. keys: 32 bytes by the id of every other member of its sum, for this attempt only. Raises
    ValueError for a sum of fewer than three, or one in which the client is its own partner.
    """
    if len(keys) + 1 < GROUP_MIN or client_id in keys:
        raise ValueError(f"a sum needs {GROUP_MIN} different members, got client {client_id} and {sorted(keys)}")
    add(words, [(j > client_id, key) for j, key in sorted(keys.items())])


def add(words: Words, masks: list[tuple[bool, bytes]]) -> None:
    """Add or subtract masks, in place. words: uint64 [n]. masks: whether to add it, and its key of 32 bytes."""
    streams = [(added, _stream(key)) for added, key in masks]
    zeros, buffer = bytes(8 * _CHUNK), bytearray(8 * _CHUNK + 16)
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        for added, stream in streams:
            stream.update_into(zeros[: 8 * part.size] if part.size < _CHUNK else zeros, buffer)
            (np.add if added else np.subtract)(part, np.frombuffer(buffer, "<u8", part.size), out=part)


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()


def stream(key: bytes, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of a key's pseudorandom stream.

    The stream is AES-128 in counter mode. The first 16 bytes of the key are the AES key, the other 16 are the initial
    counter.
    """
    return _stream(key).update(bytes(nbytes))


_PRIME = 2**255 - 19
# bytes of a share, and of a seed, which is below the prime
SHARE, SEED = 32, 31
# revealed in place of a share that a member did not get: it is above the prime, so no share
BLANK = b"\xff" * SHARE


def split(seed: bytes, members: Sequence[int], needed: int) -> dict[int, bytes]:
    """Return each member's share of a seed of 31 bytes, 32 bytes each. `needed` shares restore the seed."""
    drawn = [int.from_bytes(secure_random.secret(40), "big") % _PRIME for _ in range(needed - 1)]
    coefficients = [*drawn, int.from_bytes(seed, "big")]

    def at(x: int) -> bytes:
        value = 0
        for coefficient in coefficients:
            value = (value * x + coefficient) % _PRIME
        return value.to_bytes(SHARE, "big")

    return {member: at(member + 1) for member in members}


def restore(holders: Sequence[int], several: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return seeds from their shares. holders: the members that have a share of each. several: for each seed, their shares.

    A seed is b"" if its shares are not those of 31 bytes.
    """
    factors = []
    for i in holders:
        above = below = 1
        for j in holders:
            if j != i:
                above, below = above * (j + 1) % _PRIME, below * (j - i) % _PRIME
        factors.append(above * pow(below, -1, _PRIME) % _PRIME)
    found = []
    for shares in several:
        values = (int.from_bytes(share, "big") * factor for share, factor in zip(shares, factors, strict=True))
        seed = sum(values) % _PRIME
        found.append(b"" if seed >> (8 * SEED) else seed.to_bytes(SEED, "big"))
    return found


def commitment(content: bytes, maker: int, holder: int | None = None) -> str:
    """Return the hash by which a client is bound to a member's share of its seed, or without a member to the seed itself."""
    return hashlib.sha256(f"corolla share {maker} {holder} ".encode() + content).hexdigest()


def own_mask(seed: bytes) -> bytes:
    """Return the key of an upload's own mask."""
    return derived(seed, "own mask")


def remove(
    total: Words,
    masks: Sequence[bytes],
    survivors: Sequence[int],
    dropped: Collection[int],
    between: Mapping[tuple[int, int], bytes],
) -> None:
    """Remove the masks from a sum over survivors, in place.

    total: uint64 [n]. masks: the keys of the survivors' own masks. between: the key of each survivor with each dropped
    member.
    """
    streams = [(False, key) for key in masks]
    streams += [(i > j, between[i, j]) for i in survivors for j in dropped]
    if streams:
        add(total, streams)
