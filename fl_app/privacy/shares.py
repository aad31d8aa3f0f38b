"""Secret shares, and the removal of masks from a sum over the members that answered.

Besides its pairwise masks each upload has a mask of its own, PRG(b_i). Its seed b_i is shared among the members of the
sum: two thirds of them can restore it, fewer learn nothing (Shamir, "How to share a secret", CACM 1979). A member
reveals, for one set of survivors only, its shares of the survivors' seeds, and the pairwise keys that it has with the
others. So no upload loses both its own mask and its pairwise masks: for that, two thirds of the members would have
to count its client among the survivors, and all members of another set as large would have to count it among the others.

With its shares a client sends their hashes, and the seed's. A member that cannot open a share, or gets another one, reveals
none (BLANK). So a share that does not fit is its holder's fault, and a seed that does not fit its maker's.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. There a dropped
client's key is restored from shares, too. Here all survivors reveal the keys that they have with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from fl_app.privacy import masking, secure_random
from fl_app.privacy.masking import Words, derived

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
        masking.add(total, streams)
