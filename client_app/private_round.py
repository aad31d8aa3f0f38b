"""A client's side of a private round (docs/privacy.md): mask the upload, or refuse if that would not hide it."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_app.run_keys import SiteKeys
from fl_app.errors import UserError, counted
from fl_app.keys import Scalar
from fl_app.layout import NOTHING
from fl_app.privacy import aggregation_groups, masking, secure_random, sketch
from fl_app.privacy.aggregation_groups import GroupSplit, threshold
from fl_app.privacy.keyring import RunKeys, exchange, halves, opened, sealed
from fl_app.privacy.masking import Words, derived
from fl_app.privacy.transcript import SentHashes, Transcript
from fl_app.transport.wire import (
    AGREE,
    AGREED,
    BETWEEN,
    COMMITTED,
    GROUP_MIN,
    OPEN,
    OPENED,
    PRIVATE,
    SEAL,
    SEALED,
    SHARES,
    SIGNED,
    SPLIT,
    SPLITS,
    SUM,
    Download,
    Upload,
    state_version,
)

__all__ = ["Masker", "properties"]

log = logging.getLogger("corolla")


def properties(keys: RunKeys) -> dict[str, Scalar]:
    """Return a client's properties for private runs.

    These are its keys for the run, signed, and its list of all clients' permanent keys.
    """
    return {f"{PRIVATE}-keys": keys.announced, f"{PRIVATE}-list": keys.ring.text}


def answered(question: Download, site: SiteKeys) -> dict[str, Scalar]:
    """Return the answer to a question of a private round. Raises UserError if it must not be answered."""
    said, keys = question.method, site.keys
    if question.task == SPLIT:
        return {SIGNED: site.sign_split(question.experiment, _splits(said))}
    try:
        clients = tuple(int(word) for word in str(said[f"{PRIVATE}-members"]).split(","))
        texts = {name: str(said.get(name, "")).split(",") for name in (f"{PRIVATE}-keys", SHARES, COMMITTED, AGREED)}
    except (KeyError, ValueError):
        raise UserError(key="private", rule="the question does not name clients") from None
    if question.task == SEAL and len(texts[f"{PRIVATE}-keys"]) == len(clients):
        return {SEALED: ",".join(keys.seal(dict(zip(clients, texts[f"{PRIVATE}-keys"], strict=True))))}
    if question.task not in (AGREE, OPEN):
        raise UserError(key="private", rule=f"there is no question {question.task[:20]!r} about these clients")
    _check_members(clients, keys.ring.client_id, keys.ring.num_clients)
    claimed = question.experiment, question.round, question.attempt
    noted = site.help_open(*claimed, clients, _splits(said))
    if question.task == AGREE:
        return {AGREED: keys.agree(noted["label"], clients)}
    return _opened(noted, clients, texts, keys)


def _splits(said: Mapping[str, Scalar]) -> list[GroupSplit]:
    """Return the splits of a client's aggregation group in a message. Raises UserError if they cannot be read."""
    try:
        return aggregation_groups.read(str(said.get(SPLITS, "[]")))
    except ValueError as error:
        raise UserError(key="private", rule=error) from None


def tags(keys: RunKeys, names: str) -> str:
    """Return tags of a client's names, one per client, separated by commas.

    Each uses the key that the two clients share. Two clients' tags of each other are equal if their names are. The
    server has none of these keys, so it cannot guess names.
    """
    found = keys.ring.for_each("names", keys.run)
    return ",".join(hmac.new(key, names.encode(), "sha256").hexdigest() for key in found)


@dataclass(frozen=True)
class Masker:
    """Masks one upload with this client's keys, for the members of its sum.

    transcript: of the attempt, without the length of the sum. others: by other member, its key for masks. weight: this client's
    own weight, in (0, 1]. limit: the largest absolute value of a parameter that is not clipped. sealed: the sketches' key,
    encrypted by client `sealer`, whose keys are `sealers`; "" where the method sends no masks.
    """

    site: SiteKeys
    transcript: Transcript
    others: dict[int, bytes]
    weight: float
    limit: float
    sketch_bits: int
    sealed: str
    sealer: int
    sealers: str

    @classmethod
    def of(cls, download: Download, site: SiteKeys, samples: int, weigh: Callable[[float], float]) -> Masker:
        """Read the server's request, and note that it is answered. Raises UserError if the answer would not be hidden.

        samples: this client's number of training samples. weigh: returns the weight of a number of samples, in (0, 1].
        """
        asked, keys, config, me = download.method, site.keys, site.config, site.keys.ring.client_id
        try:
            members = tuple(int(word) for word in str(asked[f"{PRIVATE}-members"]).split(","))
            announced = tuple(str(asked[f"{PRIVATE}-keys"]).split(","))
            sent = tuple(str(asked[f"{PRIVATE}-sent"]).split(","))
            most = float(asked[f"{PRIVATE}-most"])
            sealed, sealer = str(asked.get(SEALED, "")), int(asked.get(f"{PRIVATE}-sealer", 0))
            sealers = str(asked.get(f"{PRIVATE}-sealer-keys", ""))
        except (KeyError, ValueError):
            raise UserError(key="private", rule="the server does not name the clients to mask with") from None
        _check_members(members, me, keys.ring.num_clients)
        if not len(members) == len(announced) == len(sent):
            raise UserError(key="private", rule="the server does not say what each member of the sum is sent")
        # sums under several bounds show how many members have more samples than each
        if not (1 <= most < math.inf if config.max_size_weight else most == 0):
            rule = f"with max-size-weight = {config.max_size_weight:g} the server's bound on counts cannot be {most:g}"
            raise UserError(key="private", rule=rule)
        mine = sent[members.index(me)]
        if mine != SentHashes(config.private_left_out == "group").of(download, {}) or sent.count(mine) < GROUP_MIN:
            raise UserError(
                key="private",
                rule=f"fewer than {GROUP_MIN} members of the sum are sent what client {me} is sent; its upload "
                "would show",
            )
        public = {i: keys.verified(i, text)[0] for i, text in zip(members, announced, strict=True)}
        if len(set(public.values())) < len(members) or announced[members.index(me)] != keys.announced:
            raise UserError(key="private", rule=f"the server's keys of the members do not fit client {me}")
        attempt = download.experiment, keys.run, keys.config, download.round, download.attempt
        transcript = Transcript(*attempt, members, sent, announced, keys.ring.fingerprint, most, 0)
        # those that are sent something else may be known to the server, so the aggregation group must be among the others
        alike = [i for i, text in zip(members, sent, strict=True) if text == mine]
        site.claim(download.experiment, download.round, download.attempt, alike, _splits(asked))
        weight = weigh(site.count(download.experiment, samples, most))
        others = {i: key for i, key in public.items() if i != me}
        bits, limit = config.private_sketch, config.private_range
        return cls(site, transcript, others, weight, limit, bits, sealed, sealer, sealers)

    def note_clipped(self, why: str) -> None:
        """Note that what a client would send is not sent as it is. The server learns of it at the run's end."""
        log.warning("private: round %d: %s", self.transcript.round, why)
        self.site.note_clipped(self.transcript.experiment)

    def mask(self, upload: Upload) -> Upload:
        """Return the upload to send: the model in fixed point under masks, and the sketch of its mask.

        The method's own metrics are left out. Values beyond the range are clipped to it. Raises UserError if the method
        would send other arrays.
        """
        if upload.extras:
            raise UserError(key="private", rule=f"the method would send {', '.join(upload.extras)} without masks")
        told, keys = self.transcript, self.site.keys
        words, clipped = masking.encode(upload.model, self.weight, keys.ring.num_clients, self.limit)
        if clipped:
            self.note_clipped("values beyond private-range were clipped")
        label = dataclasses.replace(told, words=words.size).digest
        shared = {i: _mask_key(keys, key, i, label) for i, key in self.others.items()}
        masking.mask(words, keys.ring.client_id, shared)
        told_of_own = self._mask_alone(words, label)
        facts = {"members": told.members, "keys": told.keys, "label": label}
        self.site.note_answer(told.experiment, told.round, told.attempt, facts)
        hidden = None
        if upload.mask is not None:
            d = upload.model.params.size
            secret = keys.open(self.sealed, self.sealer, self.sealers)
            key = derived(secret, "sketch", told.experiment, told.round, told.attempt)
            hidden = sketch.sketch(upload.mask, d, sketch.length(d, self.sketch_bits), key)
        version = state_version(told.round, told.attempt)
        return Upload(NOTHING, hidden, {SUM: words}, {PRIVATE: version, **told_of_own}, upload.num_examples)

    def _mask_alone(self, words: Words, label: str) -> dict[str, str]:
        """Add this upload's own mask, in place. Return the shares of its seed, sealed for each member in order, and hashes."""
        keys, members, me = self.site.keys, self.transcript.members, self.site.keys.ring.client_id
        seed = secure_random.secret(masking.SEED)
        masking.add(words, [(True, masking.own_mask(seed))])
        parts = masking.split(seed, members, threshold(len(members)))
        of = zip(members, self.transcript.keys, strict=True)
        texts = (sealed(keys.share_key(text, label, me, j), parts[j]) for j, text in of)
        promised = [*(masking.commitment(parts[j], me, j) for j in members), masking.commitment(seed, me)]
        return {SHARES: ",".join(texts), COMMITTED: ",".join(promised)}


def _opened(
    noted: Mapping[str, Any], survivors: Sequence[int], texts: Mapping[str, list[str]], keys: RunKeys
) -> dict[str, Scalar]:
    """Return this client's part in opening a sum: its shares of the survivors' own masks, and its keys with the other members.

    noted: the notes on the attempt (`SiteKeys.note_answer`). texts: by survivor, the sealed share, its hash, and the
    signature of the survivors. If members dropped out, as many must have signed as have to answer. A share that cannot be
    opened, or has another hash, is BLANK. Raises UserError, also if these are more than a third.
    """
    members, label, me = list(noted["members"]), str(noted["label"]), keys.ring.client_id
    of = dict(zip(members, noted["keys"], strict=True))
    gone = [u for u in members if u not in survivors]
    needed = threshold(len(members)) if gone else 0
    signed = zip(survivors, texts[AGREED], strict=False)
    if sum(keys.agrees(j, label, survivors, text) for j, text in signed if needed) < needed:
        raise UserError(key="private", rule=f"{needed} members must have agreed on those that are left")
    if not len(texts[SHARES]) == len(texts[COMMITTED]) == len(survivors):
        raise UserError(key="private", rule="the server does not send the shares that open a sum")
    found = {
        j: opened(keys.share_key(of[j], label, j, me), text) for j, text in zip(survivors, texts[SHARES], strict=True)
    }
    promised = dict(zip(survivors, texts[COMMITTED], strict=True))
    lost = [j for j, share in found.items() if share is None or masking.commitment(share, j, me) != promised[j]]
    if 3 * len(lost) > len(survivors):
        raise UserError(key="private", rule=f"clients {lost} sealed no shares for client {me} in this attempt")
    if lost:
        log.warning("private: clients %s sealed no shares for client %d in this attempt", lost, me)
    between = (_mask_key(keys, halves(of[u])[0], u, label) for u in gone)
    return {
        OPENED: ",".join((masking.BLANK if share is None or j in lost else share).hex() for j, share in found.items()),
        BETWEEN: ",".join(key.hex() for key in between),
    }


def _mask_key(keys: RunKeys, public: bytes, other: int, label: str) -> bytes:
    """Return the key of the mask between this client and another one, for one attempt.

    It names both: two members that announce the same key must not have the same masks with a third one.
    """
    return derived(exchange(keys.masks, public), "mask", label, *sorted((keys.ring.client_id, other)))


def _check_members(members: tuple[int, ...], me: int, num_clients: int) -> None:
    """Raise UserError unless a sum's members are three clients or more, sorted, with this one."""
    if list(members) != sorted(set(members)) or me not in members or not set(members) <= set(range(num_clients)):
        raise UserError(key="private", rule=f"the server's group does not fit client {me}: {list(members)}")
    if len(members) < GROUP_MIN:
        raise UserError(
            key="private",
            rule=f"the server asks for a sum of {counted(len(members), 'client')}, but only {GROUP_MIN} or "
            "more hide each other",
        )
