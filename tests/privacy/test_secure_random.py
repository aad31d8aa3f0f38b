"""Randomness that protects people: keys of 256 bits, streams, noise, and nothing that takes it anywhere else."""

from __future__ import annotations

import ast
import os
import pickle
import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from client_app.batches import SecretDraws, hide_globals
from client_app.noise import STEP, noisy
from fl_app.privacy import secure_random
from fl_app.privacy.secure_random import KEY_BYTES, SecureRandom
from tests.test_architecture import ROOT, modules, parsed

KEY = bytes(range(KEY_BYTES))
OUTPUTS = {
    "words": lambda stream: stream.words(500).astype(np.float64) / 2**64 - 0.5,
    "uniform": lambda stream: stream.uniform(500) - 0.5,
    "batches": lambda stream: np.isin(np.arange(500), SecretDraws(stream).included(500, 0.5).numpy()),
    "noise": lambda stream: noisy(torch.zeros(500), 1.0, stream).double().numpy(),
}


def flipped(bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(KEY))


# keys


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_bit_of_a_key_changes_every_output(output: str) -> None:
    """A generator that keeps 32 bits of its seed gives equal noise for keys that differ in the others."""
    draw = OUTPUTS[output]
    first = draw(SecureRandom(KEY))
    assert np.array_equal(first, draw(SecureRandom(KEY)))
    for bit in range(8 * KEY_BYTES):
        other = draw(SecureRandom(flipped(bit)))
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.25


def test_a_secret_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or bytes(n))
    assert secure_random.secret() == bytes(32) and secure_random.secret(12) == bytes(12)
    SecureRandom.of_secret()
    assert asked == [32, 12, 32]


def test_a_simulations_keys_are_of_all_their_words() -> None:
    def words(*of: object) -> list[int]:
        return list(SecureRandom.of_seed(*of).words(4))  # type: ignore[arg-type]

    each = [(5, "a", 1, 2), (5 + 2**32, "a", 1, 2), (5 + 2**63, "a", 1, 2), (5, "b", 1, 2), (5, "a", 2, 1), (5, "a")]
    assert words(*each[0]) == words(*each[0])
    assert len({tuple(words(*of)) for of in each}) == len(each)


def test_the_stream_is_aes_in_counter_mode() -> None:
    n = 100_003
    expected = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(8 * n))
    stream = SecureRandom(KEY)
    parts = [stream.words(k) for k in (1, 40_000, n - 40_001)]
    assert np.concatenate(parts).tobytes() == expected
    # pieces that begin and end inside a block, and inside what is made at once
    stream, pieces = SecureRandom(KEY), [np.empty(size, np.uint8) for size in (1, 15, 16, 17, 33, 262_144, 270_001)]
    for piece in pieces:
        stream.fill(piece)
    joined = np.concatenate(pieces).tobytes()
    assert joined == expected[: len(joined)]


def test_a_key_stays_in_its_process() -> None:
    stream = SecureRandom(KEY)
    with pytest.raises(TypeError):
        pickle.dumps(stream)
    assert not any(KEY in repr(value).encode() or value == KEY for value in vars(stream).values())
    child = os.fork()
    if child == 0:
        try:
            stream.words(1)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stream.words(1)


def test_what_makes_no_sense_is_refused() -> None:
    for key in (b"", KEY[:16], KEY + b"x"):
        with pytest.raises(ValueError, match="32 bytes"):
            SecureRandom(key)
    stream = SecureRandom(KEY)
    with pytest.raises(ValueError, match="contiguous"):
        stream.fill(np.zeros((4, 4), np.uint8)[:, 1])
    with pytest.raises(ValueError, match=r"\[3, 3\)"):
        stream.integers(3, 3, 1)
    for deviation in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="deviation"):
            noisy(torch.zeros(2), deviation, stream)


def test_numbers_have_their_distribution() -> None:
    stream = SecureRandom(KEY)
    assert stats.kstest(stream.uniform(20_000), "uniform").pvalue > 0.001
    found = stream.integers(-3, 4, 70_000)
    assert stats.chisquare(np.bincount(found + 3, minlength=7)).pvalue > 0.001
    draws = SecretDraws(stream)
    assert draws.coins(10_000).double().mean() == pytest.approx(0.5, abs=0.02)
    sizes = [len(draws.included(1000, 0.03)) for _ in range(2000)]
    assert np.mean(sizes) == pytest.approx(30, abs=0.5) and np.var(sizes) == pytest.approx(29.1, rel=0.15)
    assert len(draws.included(50, 1.0)) == 50 and len(draws.included(50, 0.0)) == 0


# noise


def test_noise_is_normal() -> None:
    drawn = noisy(torch.zeros(400_001), 3.0, SecureRandom(KEY)).double().numpy() / 3
    assert stats.kstest(drawn[:100_000], "norm").pvalue > 0.001
    assert drawn.mean() == pytest.approx(0, abs=0.01) and drawn.std() == pytest.approx(1, rel=0.005)
    assert stats.kurtosis(drawn) == pytest.approx(0, abs=0.05)
    assert np.corrcoef(drawn[:-1], drawn[1:])[0, 1] == pytest.approx(0, abs=0.01)
    assert (np.abs(drawn) > 3.5).mean() == pytest.approx(2 * stats.norm.sf(3.5), rel=0.3)


def test_noise_is_made_of_all_its_words() -> None:
    """Box and Muller by NumPy, of the same words, over the border of what is made at once."""
    n, block = 32_768 + 7, 32_768
    total = torch.arange(n, dtype=torch.float32) / n
    stream, made = SecureRandom(KEY), []
    for size in (block, n - block):
        pairs = -(-size // 2)
        words = stream.words(2 * pairs)
        radius = np.sqrt(-2 * np.log(((words[:pairs] & np.uint64(2**63 - 1)) + 0.5) * 2.0**-63))
        angle = words[pairs:].view(np.int64) * (2 * np.pi * 2.0**-64)
        made.append(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])
    expected = total.double().numpy() + 2.0 * np.concatenate(made)
    found = noisy(total, 2.0, SecureRandom(KEY)).double().numpy()
    assert np.abs(found - expected).max() <= 0.51 * 2.0 * STEP
    # no second array of the model's size
    assert np.array_equal(found, total.double().numpy())


@pytest.mark.parametrize("total", [0.0, 0.1, 1 / 3, 7.7])
@pytest.mark.parametrize("deviation", [1.0, 0.3, 57.0])
def test_possible_sums_are_the_same_for_all_data(total: float, deviation: float) -> None:
    """Floating-point normals added to a sum leave low-order bits that only this sum can have (Mironov, 2012)."""
    found = noisy(torch.full((50_000,), total), deviation, SecureRandom(KEY)).double().numpy()
    step = 2.0 ** np.floor(np.log2(deviation * STEP))
    assert deviation * STEP / 2 < step <= deviation * STEP
    multiples = found / step
    # float32 holds 24 bits of larger ones
    near = multiples[np.abs(multiples) < 2**24]
    assert len(near) > 0.99 * len(multiples) and np.array_equal(near, np.rint(near))
    lowest = np.bincount(near.astype(np.int64) % 4, minlength=4)
    assert stats.chisquare(lowest).pvalue > 0.001
    assert found.mean() == pytest.approx(total, abs=0.03 * deviation)


def test_the_rarest_words_give_far_but_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SecureRandom(KEY)
    found = []
    for word in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        monkeypatch.setattr(stream, "fill", lambda array, word=word: array.view(np.uint64).fill(word))
        found.append(noisy(torch.zeros(4), 1.0, stream))
    far = torch.stack(found)
    assert bool(far.isfinite().all()) and far.abs().max() == pytest.approx(9.42, abs=0.01)


def test_a_sum_keeps_its_shape_and_an_empty_one_needs_none() -> None:
    total = torch.arange(6.0).reshape(2, 3).t()
    out = noisy(total, 1e-6, SecureRandom(KEY))
    assert out.shape == (3, 2) and torch.allclose(out, total, atol=1e-4) and out.dtype == torch.float32
    assert noisy(torch.zeros(0), 1.0, SecureRandom(KEY)).shape == (0,)


def test_dropout_follows_from_no_seed() -> None:
    """`torch.manual_seed` keeps 32 bits: here the whole state of each global generator is drawn."""

    def drawn(key: bytes) -> tuple[float, ...]:
        hide_globals(SecureRandom(key), torch.device("cpu"))
        state = torch.default_generator.get_state()[24 : 24 + 8 * 624].view(torch.int64)
        assert len(state.unique()) == 624 and 0 <= int(state.min()) and int(state.max()) < 2**32
        return float(torch.rand(())), float(np.random.random()), random.random()  # noqa: NPY002 - a user's model may use it

    once, again = drawn(KEY), drawn(KEY)
    assert once == again
    for bit in (0, 31, 32, 64, 200, 255):
        assert all(a != b for a, b in zip(drawn(flipped(bit)), once, strict=True))


# where randomness comes from

SEEDED = {"fl_app.rng", "random", "numpy.random", "uuid"}
TORCH = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "Generator", "default_generator", "manual_seed", "seed", "initial_seed", "dropout",
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
}  # fmt: skip


def sources(wanted: Callable[[str, str], bool]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the files whose path and text are wanted: parsing all takes seconds."""
    for path in sorted(modules().values()):
        name = path.relative_to(ROOT).as_posix()
        if wanted(name, path.read_text(encoding="utf-8")):
            yield name, parsed(path)


@cache
def names(tree: ast.AST) -> set[str]:
    """Dotted names that code imports or uses: `os.urandom`, `numpy.random`, `torch.rand`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node).replace("np.", "numpy."))
    return found


SECRET = ("secrets", "urandom", "getrandom", "SystemRandom")


def test_secrets_come_from_one_module() -> None:
    wrong = {
        f"{path}: {name}"
        for path, tree in sources(lambda path, text: any(word in text for word in SECRET))
        if path != "fl_app/privacy/secure_random.py"
        for name in names(tree)
        if name in ("secrets", "os.urandom", "os.getrandom") or name.endswith("SystemRandom")
    }
    assert not wrong


def unprotected(tree: ast.AST) -> set[str]:
    """Randomness in code that anyone can repeat."""
    return {
        name
        for name in names(tree)
        if any(f"{name}.".startswith(f"{module}.") for module in SEEDED)
        or (("torch" in name.split(".") or name.endswith("_")) and name.split(".")[-1] in TORCH)
    }


PROTECTING = (
    "fl_app/privacy/",
    "client_app/dp.py",
    "client_app/noise.py",
    "client_app/private_round.py",
    "client_app/run_keys.py",
    "client_app/notes.py",
)


def test_protecting_code_takes_no_other_randomness() -> None:
    trees = dict(sources(lambda path, text: path.startswith((*PROTECTING, "client_app/batches.py"))))
    draws = trees.pop("client_app/batches.py")
    seen = {path: unprotected(tree) for path, tree in trees.items()}
    assert len(seen) >= 8
    # a fixed seed for a made-up sample, by which a model is checked
    seen["client_app/dp.py"].discard("torch.manual_seed")
    # the first aggregation groups are public: every client draws the same ones
    seen["fl_app/privacy/aggregation_groups.py"] -= {"fl_app.rng", "numpy.random", "numpy.random.Generator"}
    assert not {path: found for path, found in seen.items() if found}
    (secret,) = (node for node in draws.body if isinstance(node, ast.ClassDef) and node.name == "SecretDraws")
    assert not unprotected(secret)


@pytest.mark.parametrize(
    "line",
    ["torch.normal(0, 1, (3,))", "np.random.default_rng(1)", "import random", "from fl_app import rng", "x.normal_()"],
)
def test_other_randomness_is_found(line: str) -> None:
    assert unprotected(ast.parse(line))
