"""Private rounds (docs/privacy.md): clients send masked models, and the server forms sums over groups of clients.

Every pair of a group's members adds and subtracts a mask that belongs to this attempt at this round, and each member adds
one of its own. Once all have answered or dropped out, the members that are left agree on whom that is, and reveal what
opens the sum of their uploads, and of no others (fl_app/privacy/masking.py). strategies/engine/group_store.py limits the facts
that all sums of a run reveal together.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app import reasons, rng
from fl_app.config import RunConfig
from fl_app.errors import MethodError, MethodFault, UserError
from fl_app.keys import Scalar
from fl_app.layout import NO_TENSORS, Model
from fl_app.privacy import aggregation_groups
from fl_app.privacy.aggregation_groups import threshold
from fl_app.privacy.transcript import SentHashes, Transcript
from fl_app.run_secret import experiment_of
from fl_app.server.properties import KEYS
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
    SUM,
    Expected,
    Upload,
    WireError,
    state_version,
)
from strategies.base.server_half import ServerHalf
from strategies.base.state import DeclaredSizes, State, Sums, UploadBuffer
from strategies.engine import group_store
from strategies.engine.attempt import Numbers, Questions, RoundAttempt, TooFewResults
from strategies.engine.group_store import GroupStore, Signatures
from strategies.engine.plain import PlainRounds, privacy_budget, require_results
from strategies.engine.screening import USUAL, SumDistances

if TYPE_CHECKING:
    from fl_app.privacy.keyring import Statements

log = logging.getLogger("corolla")


@dataclass(kw_only=True)
class MaskedSum(UploadBuffer):
    """Sums that uploads are added to as they come.

    - `config`: the run's. `d`: the number of travelling parameters. `version`: of the client states that the attempt makes.
    - `groups`: by label, the members of a sum.
    - `totals`: uint64 [P, d + b + 1], sums of uploads of which all or none are in a group's sum.
    - `row_of_sum`: by client, its row in `totals`.
    - `sent`: by client, the hash of what it is sent. `keys`: by client, its signed keys of the run.
    - `transcripts`: by label, their digest.
    - `shares`: by client, the sealed shares of its own mask, by member.
    - `committed`: their hashes, and at None that of the mask's seed.
    - `lost`: by client, the members that have no share of its mask.
    - `seeds`: by label and client, those of own masks.
    - `survivors`: by label, the members whose sum is to be opened.
    - `agreed`: by client, its signature of them, "" for a false one.
    - `answers`: by client, its shares of their masks, and its keys with the other members.
    """

    config: RunConfig
    d: int
    version: str
    groups: Mapping[int, list[int]]
    totals: NDArray[np.uint64]
    row_of_sum: Mapping[int, int]
    sent: Mapping[int, str]
    keys: Mapping[int, str]
    transcripts: Mapping[int, str]
    shares: dict[int, dict[int, str]] = field(default_factory=dict)
    committed: dict[int, dict[int | None, str]] = field(default_factory=dict)
    lost: dict[int, set[int]] = field(default_factory=dict)
    seeds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    survivors: dict[int, list[int]] = field(default_factory=dict)
    agreed: dict[int, str] = field(default_factory=dict)
    answers: dict[int, tuple[list[bytes], list[bytes]]] = field(default_factory=dict)

    @cached_property
    def label_of(self) -> dict[int, int]:
        """By client, the label of its group."""
        return {i: label for label, own in self.groups.items() for i in own}

    def add(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar], nbytes: int = 0) -> None:
        """Add an upload to its group's sum and keep no copy. Raises WireError if its masks belong to another attempt."""
        if (made_for := upload.metrics.get(PRIVATE, "")) != self.version:
            raise WireError(f"its masks belong to attempt {str(made_for)[:20] or 'none'}, not to {self.version}")
        members = self.groups[self.label_of[client_id]]
        texts = _words(upload.metrics, SHARES, len(members), "[A-Za-z0-9+/]{80}")
        hashes = _words(upload.metrics, COMMITTED, len(members) + 1, _HEXADECIMAL)
        self.shares[client_id] = dict(zip(members, texts, strict=True))
        self.committed[client_id] = dict(zip([*members, None], hashes, strict=True))
        self.totals[self.row_of_sum[client_id]] += upload.extras[SUM]
        rest = Upload(upload.model, upload.mask, num_examples=upload.num_examples)
        super().add(client_id, rest, metrics, nbytes)

    def result(self) -> Any:
        """Return the sums as means (Sums). Raises TooFewResults if masks did not cancel: the client at fault cannot be found."""
        totals = {label: self._opened(label) for label in self.survivors}
        means = {label: self._mean(total, self.survivors[label]) for label, total in totals.items()}
        ids = sorted(i for own in self.survivors.values() for i in own)
        whole = self._mean(np.add.reduce([*totals.values()], axis=0, dtype=np.uint64), ids)
        bits = None if self.bits is None else self.bits[[self.row_of[i] for i in ids]]
        return Sums(ids, self.survivors, means, whole, bits, self.expected.num_params)

    def agree(self, client_id: int, text: str, statements: Statements) -> None:
        """Take a client's signature of its group's survivors. Raises WireError if it is false: it is kept as ""."""
        label = self.label_of[client_id]
        made = statements.agrees(client_id, self.transcripts[label], self.survivors[label], text)
        self.agreed[client_id] = text if made else ""
        if not made:
            raise WireError(f"{AGREED}: its signature of the clients that are left is false")

    def dropped(self, label: int) -> list[int]:
        """Return the members of a group that are not among its survivors."""
        return [i for i in self.groups[label] if i not in self.survivors[label]]

    def needed(self, label: int) -> int:
        """Return how many of a group's members must help to open its sum."""
        return len(self.survivors[label]) if self.dropped(label) else threshold(len(self.groups[label]))

    def is_open(self, label: int) -> bool:
        """Return whether enough of a group's members have helped to open its sum: with enough shares of each own mask."""
        helped = sum(i in self.answers for i in self.survivors[label])
        return helped >= self.needed(label) and not self.short(label)

    def short(self, label: int) -> list[int]:
        """Return the survivors of a group of whose own mask too few shares are known."""
        own, enough = self.survivors[label], threshold(len(self.groups[label]))
        helped = sum(i in self.answers for i in own)
        return [i for i in own if helped - len(self.lost.get(i, ())) < enough]

    def answer(self, client_id: int, entries: Numbers) -> None:
        """Take a client's part in opening its group's sum. Raises WireError if it is malformed, or has a wrong share."""
        from fl_app.privacy.masking import BLANK, commitment

        label = self.label_of[client_id]
        own, gone = self.survivors[label], self.dropped(label)
        held, between = (
            [bytes.fromhex(word) for word in _words(entries, name, count, _HEXADECIMAL)]
            for name, count in ((OPENED, len(own)), (BETWEEN, len(gone)))
        )
        lost = [i for i, share in zip(own, held, strict=True) if share == BLANK]
        for i, share in zip(own, held, strict=True):
            if i not in lost and commitment(share, i, client_id) != self.committed[i][client_id]:
                raise WireError(f"{OPENED}: the share of client {i}'s mask is not the one that it was sent")
        for i in lost:
            self.lost.setdefault(i, set()).add(client_id)
        self.answers[client_id] = held, between

    def restored(self, label: int) -> dict[int, bytes]:
        """Return the seeds of the survivors' own masks. One is left out if its client has promised another."""
        from fl_app.privacy import masking

        if label in self.seeds:
            return self.seeds[label]
        own, found = self.survivors[label], self.seeds.setdefault(label, {})
        enough, alike = threshold(len(self.groups[label])), dict[tuple[int, ...], list[int]]()
        helped = [i for i in own if i in self.answers]
        for i in own:
            holders = [j for j in helped if j not in self.lost.get(i, ())][:enough]
            alike.setdefault(tuple(holders), []).append(i)
        place = {i: at for at, i in enumerate(own)}
        for by, makers in alike.items():
            several = [[self.answers[j][0][place[i]] for j in by] for i in makers]
            seeds = zip(makers, masking.restore(by, several), strict=True)
            found |= {i: seed for i, seed in seeds if masking.commitment(seed, i) == self.committed[i][None]}
        return found

    def at_fault(self, label: int) -> dict[int, str]:
        """Return the survivors of a group that keep its sum from being opened, with the cause.

        If a share is missing, its maker or its holder lies. The one in most of these pairs is named, or both.
        """
        if self.is_open(label):
            lied = [i for i in self.survivors[label] if i not in self.restored(label)]
            return dict.fromkeys(lied, "its shares do not open its upload")
        pairs = [(i, j) for i in self.short(label) for j in sorted(self.lost.get(i, ()))]
        count = Counter(i for pair in pairs for i in pair)
        return {
            i: f"it sealed no shares for clients {sorted(self.lost.get(i, ()))}, or says so of clients "
            f"{[maker for maker, holder in pairs if holder == i]}"
            for i in count
            if count[i] == max(count.values())
        }

    def _opened(self, label: int) -> NDArray[np.uint64]:
        """Return a group's sum without masks. Raises TooFewResults if too few members helped to open it."""
        from fl_app.privacy import masking

        own, gone = self.survivors[label], self.dropped(label)
        if not self.is_open(label):
            silent = [i for i in own if i not in self.answers]
            # where half of them are silent, the network is at fault rather than they
            raise TooFewResults(_gone(silent, own), [*([] if 2 * len(silent) >= len(own) else silent), *gone])
        masks = [masking.own_mask(seed) for seed in self.restored(label).values()]
        rows = sorted({self.row_of_sum[i] for i in own})
        total: NDArray[np.uint64] = np.add.reduce(self.totals[rows], axis=0, dtype=np.uint64)
        between = {(i, j): key for i in own if gone for j, key in zip(gone, self.answers[i][1], strict=True)}
        masking.remove(total, masks, own, gone, between)
        return total

    def _mean(self, total: NDArray[np.uint64], members: list[int]) -> Model:
        from fl_app.privacy import masking

        try:
            return masking.decode(total, self.d, self.config.num_clients, len(members), self.config.private_range)
        except ValueError:
            raise TooFewResults(_uncancelled(members)) from None


_HEXADECIMAL = "[0-9a-f]{64}"


def _words(entries: Mapping[str, Scalar], name: str, count: int, form: str) -> list[str]:
    """Return the words of an entry. Raises WireError unless it has so many of this form."""
    words = [word for word in str(entries.get(name, "")).split(",") if word]
    if len(words) != count or not all(re.fullmatch(form, word, re.ASCII) for word in words):
        raise WireError(f"{name} must be {count} words of the form {form}, got {len(words)} words")
    return words


def _gone(silent: list[int], own: list[int]) -> str:
    return f"clients {silent} have not helped to open the sum of clients {own}: the others are asked again"


def _uncancelled(members: list[int]) -> str:
    return (
        f"the masks of clients {members} do not cancel: one of them has wrong keys, was sent something else, or sent a wrong "
        "upload"
    )


def _statements(attempt: RoundAttempt) -> Statements:
    assert attempt.statements, "a private run's attempts have them"
    return attempt.statements


def opened_sums(buffer: UploadBuffer) -> list[list[int]]:
    """Return the clients of the sums that a private attempt can open: the server has them, even if it does not count."""
    if not isinstance(buffer, MaskedSum):
        return []
    open = (label for label in buffer.survivors if buffer.is_open(label))
    return [buffer.survivors[label] for label in open if len(buffer.restored(label)) == len(buffer.survivors[label])]


class PrivateRounds(PlainRounds):
    """The steps of rounds in which masked sums arrive."""

    def __init__(self, server: ServerHalf[Any]) -> None:
        super().__init__(server)
        self.distances = SumDistances()
        # by client and by another client's keys of the run, the sketches' key that it sealed for the other
        self.sealed: dict[int, dict[str, str]] = {}
        server.aggregation_groups = self

    @cached_property
    def store(self) -> GroupStore:
        """The run's aggregation groups, and the sample counts that its clients count with. Read when first needed."""
        first = group_store.numbered(aggregation_groups.first(self.config), self.config.num_clients)
        return GroupStore(self.server.folder.path, first)

    @cached_property
    def signatures(self) -> Signatures:
        """The signatures of the aggregation groups' splits."""
        return Signatures(self.store)

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """See ServerHalf.keep_together."""
        similarity = np.eye(len(labels))
        similarity[np.ix_(ids, ids)] = overlap
        parted, labels = group_store.grouped(self.store.groups, labels, similarity)
        self.store.replace(parted)
        return labels

    # An attempt

    def sample(self, attempt: RoundAttempt, connected: list[int]) -> list[int]:
        """Return the clients of whole aggregation groups, or of remaining parts, without clients that dropped out of the round.

        If an earlier attempt at the round has part of a group in a sum, the same part is asked, or none of the group.
        With `private-left-out = group` groups may split, if enough members are there to sign that. Raises TooFewResults
        if no client is left.
        """
        here = set(connected) - attempt.without
        whole = self.config.private_left_out == "group"
        if whole:
            self.store.replace(group_store.split(self.store.groups, here))
        all_of = group_store.members(self.store.groups)
        able = (
            [own for own in all_of if here.issuperset(own)] if whole else group_store.present(self.store.groups, here)
        )
        known = [own for earlier in attempt.earlier for own in opened_sums(earlier.buffer)]
        able = [own for own in able if not group_store.differs(self.store.groups, own, known)]
        able = [own for own in able if not whole or self.signatures.can_have(own[0], here)]
        if idle := sorted(here.difference(*able) - self.config.unseen):
            log.info(
                "round %d: clients %s are not asked: others of their aggregation groups are away", attempt.round, idle
            )
        if self.config.fraction_train < 1:
            # The order does not depend on the clients that are connected.
            order = rng.generator(self.config.seed, "sampling", attempt.round).permutation(self.config.num_clients)
            able.sort(key=lambda own: int(order[self.store.groups[own[0]]]))
            able = able[: self.config.cohort_size(len(all_of))]
        if not able:
            why = ", with no member away (private-left-out)" if whole else ""
            why += ", the same ones as in an earlier attempt" if known else ""
            raise TooFewResults(
                f"private: a round needs {GROUP_MIN} clients of an aggregation group{why}; connected and not failed: {sorted(here)}"
            )
        return sorted(i for own in able for i in own)

    def expected(self) -> Expected:
        """Return the form of an upload: a masked sum as long as the model, and the sketch of the mask if the method sends one."""
        return Expected.of(NO_TENSORS, num_params=self._sketch_bits(), extras={SUM: ("<u8", (self._words,))})

    @property
    def _words(self) -> int:
        """The number of words in an upload: its values and its weight."""
        return self.server.layout.d + self.server.layout.b + 1

    def open(self, attempt: RoundAttempt, ids: list[int]) -> UploadBuffer:
        """Fix the group of each upload, hash what each client is sent, and start the sums at 0."""
        self.turn = attempt
        if self.config.max_size_weight:
            declared = [float(attempt.declared[i]["train-samples"]) for i in ids]
            self.store.bound_sizes(declared, self.config.max_size_weight)
        groups = self.server.sum_groups(ids)
        rows = self._rows(groups)
        n, expected, hashes = len(ids), self.expected(), SentHashes(self.config.private_left_out == "group")
        empty = np.empty((n, 0), np.float32)
        attempt.expected = expected
        downloads = ((i, self.server.download_for(i, attempt, "train")) for i in ids)
        sent = {i: hashes.of(download, {**self.server.told, **attempt.states[i]}) for i, download in downloads}
        keys = {i: str(attempt.declared[i][KEYS]) for i in ids}
        return MaskedSum(
            ids,
            expected,
            W=empty,
            B=empty,
            bits=np.empty((n, -(-expected.num_params // 8)), np.uint8) if expected.num_params else None,
            extras={},
            sizes=np.zeros(n),
            config=self.config,
            d=self.server.layout.d,
            version=state_version(attempt.round, attempt.generation),
            groups=groups,
            totals=np.zeros((len(set(rows.values())), self._words), np.uint64),
            row_of_sum=rows,
            sent=sent,
            keys=keys,
            transcripts={label: self._transcript(attempt, own, sent, keys) for label, own in groups.items()},
        )

    def _transcript(
        self, attempt: RoundAttempt, members: Sequence[int], sent: Mapping[int, str], keys: Mapping[int, str]
    ) -> str:
        """Return the digest of a sum's transcript, as its members have it."""
        by = _statements(attempt)
        return Transcript(
            experiment_of(self.server.folder.secret),
            by.run,
            by.config,
            attempt.round,
            attempt.generation,
            tuple(members),
            tuple(sent[i] for i in members),
            tuple(keys[i] for i in members),
            by.ring.fingerprint,
            self.store.most,
            self._words,
        ).digest

    def scalars(self, attempt: RoundAttempt, client_id: int) -> Mapping[str, Scalar]:
        """Return the members of a client's group, their keys, the hashes of what they are sent, and the bound on sizes.

        If masks are sent, the sealed key of their sketches is added.
        """
        buffer = attempt.buffer
        if not isinstance(buffer, MaskedSum):
            return {}
        members = buffer.groups[buffer.label_of[client_id]]
        scalars: dict[str, Scalar] = {
            f"{PRIVATE}-members": ",".join(map(str, members)),
            KEYS: ",".join(buffer.keys[i] for i in members),
            f"{PRIVATE}-sent": ",".join(buffer.sent[i] for i in members),
            f"{PRIVATE}-most": self.store.most,
        }
        scalars |= self._splits(client_id)
        if buffer.expected.num_params:
            sealer = self._sealer(attempt)
            scalars |= {f"{PRIVATE}-sealer": sealer, f"{PRIVATE}-sealer-keys": attempt.declared[sealer][KEYS]}
            scalars |= {SEALED: self.sealed[sealer][buffer.keys[client_id]]}
        return scalars

    def before(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Ask for signatures of splits, and for the sketches' key, sealed for the clients of an attempt.

        Raises TooFewResults if too few clients sign, or if the sealer is silent.
        """
        buffer, sealer = attempt.buffer, self._sealer(attempt)
        yield from self._signed_splits(buffer.ids, set(attempt.connected) - attempt.without)
        if not buffer.expected.num_params:
            return
        known = self.sealed.setdefault(sealer, {})
        assert isinstance(buffer, MaskedSum)
        if new := [i for i in buffer.ids if buffer.keys[i] not in known]:
            members, keys = ",".join(map(str, new)), ",".join(buffer.keys[i] for i in new)
            yield SEAL, {sealer: {f"{PRIVATE}-members": members, KEYS: keys}}
        if any(buffer.keys[i] not in known for i in new):
            raise TooFewResults(f"client {sealer} sealed no key of the sketches: the others are asked again", [sealer])

    def _signed_splits(self, ids: Iterable[int], here: Collection[int]) -> Iterator[Questions]:
        """Ask clients of `here` to sign the splits of these clients' aggregation groups. Raises TooFewResults if too few do."""
        if self.config.private_left_out == "group":
            yield from self.signatures.missing(ids, here)

    def _splits(self, client_id: int) -> dict[str, Scalar]:
        return self.signatures.told(client_id) if self.config.private_left_out == "group" else {}

    def _rows(self, groups: Mapping[int, list[int]]) -> dict[int, int]:
        """Return, by client, the row of sums that its upload is added to. All clients of a row count, or none.

        A row is an aggregation group's. The three members with the lowest numbers have rows of their own if they may be
        left out with an absent member (group_store.split).
        """
        apart: set[int] = set()
        if self.config.private_left_out == "group":
            able = (own for own in group_store.members(self.store.groups) if len(own) >= 2 * GROUP_MIN)
            apart = {i for own in able for i in own[:GROUP_MIN]}
        parts = {
            i: (label, -1 - i if i in apart else int(self.store.groups[i])) for label in groups for i in groups[label]
        }
        rows = {part: row for row, part in enumerate(dict.fromkeys(parts.values()))}
        return {i: rows[part] for i, part in parts.items()}

    def after(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Ask the members of each sum that are left to open it, and before that, if some dropped out, to agree on whom that is.

        Raises TooFewResults if too many clients dropped out.
        """
        buffer = attempt.buffer
        assert isinstance(buffer, MaskedSum)
        for i in buffer.metrics:
            self.signatures.heard(i)
        self._refuse_sealer(attempt, buffer)
        require_results(attempt, self.config.min_results, GROUP_MIN)
        survivors = self._survivors(attempt, buffer)
        counted_ids = {i for own in survivors.values() for i in own}
        yield from self._signed_splits(sorted(counted_ids), buffer.metrics.keys())
        if left := sorted(buffer.metrics.keys() - counted_ids):
            log.info(
                "round %d: clients %s are left out: others of their aggregation groups are away", attempt.round, left
            )
            for i in left:
                buffer.reject(i)
            require_results(attempt, self.config.min_results, GROUP_MIN)
        buffer.survivors = survivors
        told = {
            i: {f"{PRIVATE}-members": ",".join(map(str, own)), **self._splits(i)}
            for own in survivors.values()
            for i in own
        }
        if parted := [label for label in survivors if buffer.dropped(label)]:
            yield AGREE, {i: told[i] for label in parted for i in survivors[label]}
        for label in parted:
            own = survivors[label]
            without = [i for i in own if not buffer.agreed.get(i)]
            # each has keys with those that dropped out, so who is silent is needed; who signs falsely may not be
            if not buffer.agreed.keys() >= {*own} or len(own) - len(without) < threshold(len(buffer.groups[label])):
                raise TooFewResults(_gone(without, own), [*without, *buffer.dropped(label)])
        agreed = {label: ",".join(buffer.agreed[i] for i in survivors[label]) for label in parted}
        yield (
            OPEN,
            {
                i: {
                    **told[i],
                    SHARES: ",".join(buffer.shares[j][i] for j in own),
                    COMMITTED: ",".join(buffer.committed[j][i] for j in own),
                    **({AGREED: agreed[label]} if label in agreed else {}),
                }
                for label, own in survivors.items()
                for i in own
            },
        )
        self._refuse_makers(attempt, buffer)

    def _refuse_makers(self, attempt: RoundAttempt, buffer: MaskedSum) -> None:
        """Raise TooFewResults without the clients whose shares do not open the sums that they are in."""
        for i, holders in buffer.lost.items():
            log.warning("round %d: clients %s have no share of client %d's mask", attempt.round, sorted(holders), i)
        blamed = {i: cause for label in buffer.survivors for i, cause in buffer.at_fault(label).items()}
        for i, cause in blamed.items():
            attempt.fail(i, f"round {attempt.round}, {OPEN}", "dropped", WireError(cause))
        if blamed:
            shut = [label for label in buffer.survivors if not buffer.is_open(label)]
            silent = {i for label in shut for i in buffer.groups[label] if i not in buffer.answers}
            why = f"the shares of clients {sorted(blamed)} do not open the sum: the others are asked again without them"
            raise TooFewResults(why, silent.union(blamed))

    def _survivors(self, attempt: RoundAttempt, buffer: MaskedSum) -> dict[int, list[int]]:
        """Return the clients of each group whose sum may be opened: whole aggregation groups, all of which have answered.

        Raises TooFewResults if they are too few to open it.
        """
        here = set(buffer.metrics)
        absent = [i for i in buffer.ids if i not in here]
        if not absent:
            return {label: list(own) for label, own in buffer.groups.items()}
        whole, parted = self.config.private_left_out == "group", self.store.groups
        if whole:
            parted = group_store.split(parted, set(range(self.config.num_clients)) - set(absent))
            able = [own for own in group_store.members(parted) if here.issuperset(own)]
        else:
            able = group_store.present(parted, here)
        known = [own for earlier in attempt.earlier for own in opened_sums(earlier.buffer)]
        kept = {i for own in able if not group_store.differs(parted, own, known) for i in own}
        survivors = {label: [i for i in own if i in kept] for label, own in buffer.groups.items()}
        survivors = {label: own for label, own in survivors.items() if own}
        if not survivors or any(len(own) < threshold(len(buffer.groups[label])) for label, own in survivors.items()):
            raise TooFewResults(
                f"clients {absent} dropped out, and too few are left to open the sum: the others are asked again",
                absent,
            )
        self.store.replace(parted)
        return survivors

    def answer(self, attempt: RoundAttempt, client_id: int, entries: Numbers) -> bool:
        """Take a client's answer to a question. Return whether no more answers are needed."""
        buffer = attempt.buffer
        assert isinstance(buffer, MaskedSum)
        if SIGNED in entries:
            experiment = experiment_of(self.server.folder.secret)
            has_signed = partial(_statements(attempt).has_signed_split, experiment)
            self.signatures.take(client_id, str(entries[SIGNED]), has_signed)
            return False
        if not buffer.survivors:
            self._take_sealed(buffer, client_id, entries)
            return True
        self.signatures.heard(client_id)
        if AGREED in entries:
            buffer.agree(client_id, str(entries[AGREED]), _statements(attempt))
            return False
        buffer.answer(client_id, entries)
        return all(map(buffer.is_open, buffer.survivors))

    def _take_sealed(self, buffer: MaskedSum, client_id: int, entries: Numbers) -> None:
        """Take the sketches' key, sealed for the clients of an attempt."""
        new = [buffer.keys[i] for i in buffer.ids if buffer.keys[i] not in self.sealed[client_id]]
        found = str(entries.get(SEALED, "")).split(",")
        if len(found) != len(new):
            raise WireError(f"{SEALED} must be a key for each of {len(new)} clients, got {len(found)}")
        self.sealed[client_id] |= dict(zip(new, found, strict=True))

    def check(self, client_id: int, upload: Upload) -> Upload:
        """Return a masked upload as it is: the method cannot check it."""
        return upload

    def screen(self, attempt: RoundAttempt) -> Any:
        """Unmask the sums and return them. Raises TooFewResults if they cannot be opened, and has changed nothing then."""
        buffer = attempt.buffer
        assert isinstance(buffer, MaskedSum)
        sums: Sums = buffer.result()
        self._screen_sums(attempt, sums)
        return sums

    def _screen_sums(self, attempt: RoundAttempt, sums: Sums) -> None:
        """Warn of sums that lie far from the models that their clients were sent.

        With `max-update-norm` the attempt does not count: raises TooFewResults, which names their clients.
        """
        apart = {}
        for label, members in sums.groups.items():
            sent = self.server.download(self.server.state, members[0], attempt).model.params
            apart[label] = float(np.linalg.norm(sums.means[label].params.astype(np.float64) - sent))
        limit = self.config.max_update_norm or USUAL
        lines = {
            label: f"the sum of clients {sums.groups[label]} lies {times:.3g} times as far from what they were sent as is "
            "usual: one of them may have sent a wrong model"
            for label, times in self.distances.far(attempt.round, apart, limit).items()
        }
        if lines and self.config.max_update_norm:
            raise TooFewResults(f"{'; '.join(lines.values())} (max-update-norm, allowed are {limit:g} times)")
        for label, line in lines.items():
            log.warning("round %d: %s", attempt.round, line)
            attempt.outliers += [{"client": i, "cause": line} for i in sums.groups[label]]
        self.distances.note(attempt.round, apart)

    def _sealer(self, attempt: RoundAttempt) -> int:
        """Return the client whose key hides the masks: the first connected one that did not fail in the round."""
        return min(i for i in attempt.connected if i in attempt.declared and i not in attempt.without)

    def _refuse_sealer(self, attempt: RoundAttempt, buffer: MaskedSum) -> None:
        """Raise TooFewResults without the sealer if most clients cannot open what it sealed. They are not to blame."""
        from fl_app.privacy.keyring import not_sealed

        if not buffer.expected.num_params:
            return
        sealer = self._sealer(attempt)
        complain = [
            i
            for i, cause in attempt.causes.items()
            if str(why := not_sealed(sealer, i)) in cause or reasons.of(why).sentence in cause
        ]
        if 2 * len(complain) > len(buffer.ids):
            raise TooFewResults(
                f"client {sealer} sealed no key of the sketches that clients {complain} can open: they are asked again without it",
                [sealer],
            )

    def update(self, attempt: RoundAttempt, accepted: Any) -> State:
        """Let the method make the next state from sums."""
        return self.server.update_sums(self.server.state, accepted, attempt)

    def saved(self) -> Mapping[str, Any]:
        """Return the distances of sums. The aggregation groups are in a file of their own."""
        return self.distances.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the distances of sums."""
        self.distances = SumDistances.restored(saved)

    # What the server learns

    def _sketch_bits(self) -> int:
        """Return the number of bits in the sketch of a method's mask; 0 if the method sends none."""
        from fl_app.privacy import sketch

        d = self.server.form(self.server.state, self.turn).num_params
        return sketch.length(d, self.config.private_sketch) if d else 0

    def announcements(self) -> list[str]:
        """Return log lines: the facts that the server still learns about single clients."""
        config = self.config
        clusters = ["the overlap of each pair of masks", "clusters of similar masks"] if self._sketch_bits() else []
        noise = ["sample counts, which follow from the noise of dp-epsilon"] if config.dp_epsilon else []
        told = config.max_size_weight > 0 and weighs_by_size(type(self.server), config)
        counts = ["sample counts (not with max-size-weight = 0)"] if told else noise
        accuracies = ["losses and accuracies (not with report-accuracy = false)"] if config.report_accuracy else []
        left_out = "roughly the model of a client that is away for a round (not with private-left-out = group)"
        away = [left_out] if config.private_left_out == "client" else []
        always = ["absences and the time that each client takes", *away]
        learns = ["sums over groups of at least three", *clusters, *counts, *accuracies, *always]
        lines = [f"private: the server learns {', '.join(learns)} (docs/privacy.md)"]
        if self.config.max_update_norm:
            lines.append("private: max-update-norm drops no single upload: it bounds the distance of each sum")
        return lines + privacy_budget(config)


# Weights, of sizes alone ----------------------------------------------------------------------------------------------

# Sample counts of four clients. A method's weights are tested with them before a run starts.
_SIZES = [1.0, 2.0, 4.0, 9.0]
# A client with more samples counts as one with this many.
_MOST_SAMPLES = 2.0**24


def evaluated(server: ServerHalf[Any], uploads: DeclaredSizes) -> NDArray[np.float64]:
    """Return the weight of each upload by the method's hook `weights`, float64 [N].

    Raises UserError, with the method's name, unless it is a positive number for each size.
    """
    method, n = server.config.method, len(uploads.sizes)
    refused = f"method {method} cannot run private"
    broken = f"{refused}: its weights must be a positive number for each of the {n} uploads' sizes"
    try:
        weights = np.asarray(server.weights(uploads), np.float64)
    except MethodFault as fault:
        raise MethodError(key="private", rule=f"{broken}, got another result ({fault})") from None
    except UserError:
        raise
    except Exception as error:
        raise MethodError(
            key="private",
            rule=f"{refused}: its weights must follow from the uploads' ids and sizes, config and params alone, got "
            f"{type(error).__name__}: {error}",
        ) from error
    if weights.shape != (n,) or not (np.isfinite(weights).all() and (weights > 0).all()):
        raise MethodError(key="private", rule=broken, value=weights.tolist())
    return weights


def weighs_by_size(half: type[ServerHalf[Any]], config: RunConfig) -> bool:
    """Return whether a method's weights depend on sample counts."""
    server, ids = half.of_settings(config), [0, 1, 2, 3]
    unequal, equal = (evaluated(server, DeclaredSizes(config.method, ids, sizes)) for sizes in (_SIZES, [1.0] * 4))
    return not alike(unequal, equal)


def own_weight(half: type[ServerHalf[Any]], config: RunConfig, samples: float) -> float:
    """Return the weight of a client with this many samples, as a part of the largest possible weight, in (0, 1]."""
    server = half.of_settings(config)

    def times_one(size: float) -> float:
        weights = evaluated(server, DeclaredSizes(config.method, [0, 1], [size, 1.0]))
        return float(weights[0] / weights[1])

    largest = max(times_one(_MOST_SAMPLES), 1.0)
    return min(1.0, times_one(min(samples, _MOST_SAMPLES)) / largest)


def alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Return whether two vectors of weights, float64 [N], give the same means."""
    return bool(np.allclose(a / a[0], b / b[0], rtol=1e-9, atol=0))


def check_weights(half: type[ServerHalf[Any]], config: RunConfig) -> None:
    """Raise UserError unless the sums of a private run can use the method's weights.

    Within its aggregation group a client has the same relative weight in all sums of a run. So its weight must not depend
    on the other clients of a sum, or on the round. The mean over all clients belongs to no client: the hook gets it with
    a size and without an id.
    """
    server = half.of_settings(config)
    whole = evaluated(server, DeclaredSizes(config.method, [0, 1, 2, 3], _SIZES))
    for chosen in ([0, 1, 2], [1, 2, 3], [0, 2, 3]):
        part = evaluated(server, DeclaredSizes(config.method, chosen, [_SIZES[i] for i in chosen]))
        if not alike(part, whole[chosen]):
            raise MethodError(
                key="private",
                rule=f"method {config.method} cannot run private: a client's weight depends on the other "
                "clients of the round, so that sums of several rounds would reveal single models",
            )
    evaluated(server, DeclaredSizes(config.method, [], [1.0]))


def check(config: RunConfig, half: type[ServerHalf[Any]], why_not: str) -> None:
    """Raise UserError if a run cannot be private. why_not: why its method cannot run private, "" if it can."""
    if not why_not and half.sample_clients is not ServerHalf.sample_clients or half.sample is not ServerHalf.sample:
        why_not = (
            "it chooses the clients of a round itself (sample_clients), and a private run asks whole aggregation groups"
        )
    if why_not:
        raise MethodError(key="private", rule=f"method {config.method} cannot run private: {why_not}")
    check_weights(half, config)
    if config.robust != "none":
        raise MethodError(
            key="private",
            rule=f"the server sees no single upload that {config.robust} could choose among; set robust = none",
        )
    if config.collect_personal_models:
        raise MethodError(key="private", rule="collect-personal-models uploads every client's own model; leave it off")
    drawn = config.cohort_size(config.num_training)
    if config.num_clients and drawn < GROUP_MIN:
        raise MethodError(
            key="private",
            rule=f"a round needs {GROUP_MIN} clients, it has {drawn} (num-clients, fraction-train): among "
            "two, each knows the other's model",
        )
