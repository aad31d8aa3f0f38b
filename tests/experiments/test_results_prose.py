"""What the prose of docs/results.md says in figures, against the runs in results/ and the presets' published figures.

Every sentence with a figure is one of the CLAIMS below, with `{}` where the figure stands; a figure that stands in none, and is no
setting, is refused.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from functools import cache
from typing import Any

from benchmarks import fashion_mnist_table, results_page
from fl_app import plugins, presets
from fl_app.experiments import candidates, compare
from fl_app.experiments.compare import Line, Run
from strategies import METHOD_PARAMS

RESULTS = results_page.ROOT / "results"
COLUMN, DRAWN = "fedobp-fashion-mnist", "fedobp-fashion-mnist-drawn"
LOGS = tomllib.loads(results_page.LOGGED.read_text(encoding="utf-8"))
SETTINGS = re.compile(
    r"Dirichlet\(?,? ?0\.1|learning rate 0\.01|μ = 0\.01|threshold 0\.4|[Mm]omentum is 0\.7|\*Momentum\.\* With 0\.7|"
    r"the configuration beside their code has 0|30 rounds of 2 local|2 local epochs|60 rounds instead|β 12 instead"
)
FIGURE = re.compile(r"\d+\.\d+|\b\d+ points?\b")


@cache
def column(name: str) -> dict[str, Line]:
    """The runs of a column by method."""
    return {line.runs[0].config.method: line for line in results_page.lines_of(name, RESULTS / name)}


def best(method: str, stage: str = "before", of: str = COLUMN) -> float:
    """Best of the tests over all test samples, mean over seeds, in per cent."""
    return 100 * candidates.over_seeds(column(of)[method].runs)[f"{stage}, pooled, best"][0]


def printed(method: str, of: str = COLUMN) -> float:
    published = column(of)[method].preset.published
    assert published is not None
    return published.mean


def below(method: str, of: str = COLUMN) -> float:
    return printed(method, of) - best(method, of=of)


def accuracies(run: Run) -> list[float]:
    return [100 * run.folder.rounds[t]["evaluation"]["accuracy-pooled"] for t in candidates.tests(run)]


def seed(number: int, method: str, of: str = COLUMN) -> Run:
    (run,) = (run for run in column(of)[method].runs if run.config.seed == number)
    return run


def late(run: Run) -> list[float]:
    """What a round's clients have before they train, all their samples together, in rounds 301 to 400."""
    return [100 * record["accuracy-before-pooled"] for t, record in run.folder.rounds.items() if t > 300]


@cache
def beside_logs() -> dict[tuple[str, str, float], Run]:
    """The runs beside the authors' logs by (method of the run, method it is, momentum)."""
    plugins.look_in(results_page.ROOT / "sweeps")
    runs = compare.load([RESULTS / results_page.LOGS], METHOD_PARAMS)[0]
    return {(run.config.method, is_(run), run.config.momentum): run for run in runs}


def is_(run: Run) -> str:
    return results_page.PERSONAL[run.config.params.personal] if run.config.method in results_page.REPLAYED else run.config.method


REPLAYED, AS_LOGGED = "replayed:METHOD", "as_logged:METHOD"


def logged(method: str) -> list[float]:
    return [accuracy for _, accuracy, _ in LOGS["tests"][method]]


def as_run(row: str) -> float:
    """Best of the tests of a row that was run as its code runs it."""
    made = json.loads((RESULTS / COLUMN / results_page.AS_RUN / f"{row},seed=0.json").read_text(encoding="utf-8"))
    return max(100 * float(test["accuracy-pooled"]) for test in made["tests"].values())


@cache
def early() -> dict[str, list[float]]:
    """The early stage's figures by method, as its table has them: final, pooled, fine-tuned, before, after."""
    rows = fashion_mnist_table.lines([RESULTS / results_page.EARLY])[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: [float(value) for value in values[:5]] for name, *values in cells}


def claims() -> list[tuple[str, list[Any]]]:
    """Sentences of the page, and the figures in them."""
    near = [below(method) for method in ("fedobp", "fedper", "fedrep", "lg-fedavg", "feddpa", "local")]
    tuned = {method: best(method, "fine-tuned") - best(method) for method in column(COLUMN)}
    fedavg, drawn = accuracies(seed(0, "fedavg")), accuracies(seed(0, "fedavg", DRAWN))
    replayed = beside_logs()[REPLAYED, "fedavg", 0.0]
    newcomers, same = (accuracies(beside_logs()[way, "fedper", 0.7]) for way in (AS_LOGGED, REPLAYED))
    gain = [a - b for a, b in zip(newcomers, same, strict=True)]
    local, as_logged = beside_logs()["local", "local", 0.7], {m: beside_logs()[AS_LOGGED, m, 0.7] for m in ("fedper", "fedavg")}
    last = {method: accuracies(run)[-1] - logged(method)[-1] for method, run in {"local": local, **as_logged}.items()}
    first = as_logged["fedper"].folder.rounds[1]
    samples = sum(client["test-samples"] for client in first["clients"].values())
    moved = [abs(best(method) - best(method, of=DRAWN)) for method in column(DRAWN) if method != "fedavg"]
    lower = [below(method, DRAWN) for method in column(DRAWN)]
    apart = printed("fedobp") - printed("fedavg")
    own = early()
    return [
        ("Local end {:.1f} to {:.1f} points below print; FLOCO ends {:.1f} below", [min(near), max(near), below("floco")]),
        ("pFedFDA ends {:.1f}, APFL {:.1f}, FLUTE {:.1f} and FedALA {:.1f} points above",
         [-below(method) for method in ("pfedfda", "apfl", "flute", "fedala")]),
        ("{:.2f} and {:.2f} before fine-tuning.", [best("fedobp"), best("pfedfda")]),
        ("Then come FedALA {:.2f}, FLUTE {:.2f} and FedPer {:.2f}",
         [best(method) for method in sorted(column(COLUMN), key=best, reverse=True)[2:5]]),
        ("which has {:.2f}; FedOBP fine-tuned has {:.2f}.", [best("fedavg", "fine-tuned"), best("fedobp", "fine-tuned")]),
        ("The printed {:.1f} points between the two", [apart]),
        ("fine-tuned APFL {:.2f}, FedDPA {:.2f} and FedAvg {:.2f}, FedOBP {:.2f}.",
         [max(LOGS["best"][method]) for method in ("apfl", "feddpa", "fedavg", "fedobp")]),
        ("(FLUTE {:.2f}, printed {:.2f})", [LOGS["best"]["flute"][0], printed("flute")]),
        ("moves by {:.1f} points from round to round; our four tests have {:.1f} to {:.1f}.",
         [statistics.stdev(late(seed(0, "fedavg"))), min(fedavg), max(fedavg)]),
        ("our rows move by {:.1f} to {:.1f} points, FedAvg's by {:.1f}.",
         [min(moved), max(moved), best("fedavg", of=DRAWN) - best("fedavg")]),
        ("It lifts FedAvg by {:.1f} points, FLOCO by {:.1f} and APFL by {:.1f}, and lowers FedRep by {:.1f}, FLUTE by {:.1f} and "
         "FedOBP by {:.1f}.", [abs(tuned[method]) for method in ("fedavg", "floco", "apfl", "fedrep", "flute", "fedobp")]),
        ("FedAvg end within {:.1f} points of them", [max(map(abs, last.values()))]),
        ("it has {:.2f}, {:.1f} points below print.", [as_run("flute"), printed("flute") - as_run("flute")]),
        ("trains the body too and lies {:.0f} points above", [-below("flute")]),
        ("its printed row lies at FedAvg's, printed {:.2f}.", [printed("fedavg")]),
        ("with the received one and lies {:.0f} points above", [-below("fedala")]),
        ("APFL as its authors' code has it lies {:.0f} points above", [-below("apfl")]),
        ("moves by {:.1f} points (standard deviation)", [statistics.stdev(late(seed(0, "fedavg")))]),
        ("With our draw of clients the tests have {:.1f}, {:.1f}, {:.1f} and {:.1f}", fedavg),
        ("all else equal, {:.1f}, {:.1f}, {:.1f} and {:.1f} (next table): {:.1f} points below print, not {:.1f}.",
         [*accuracies(replayed), printed("fedavg") - max(accuracies(replayed)), below("fedavg")]),
        ("both draws have the same mean, {:.1f} and {:.1f}.",
         [statistics.mean(late(seed(0, "fedavg"))), statistics.mean(late(replayed))]),
        ("of the {:,} test images of the first round's clients they guess {:.0f} right, in the log {:.0f}.",
         [samples, samples * first["accuracy-before-pooled"], samples * LOGS["first-round"] / 100]),
        ("Local is {:.2f} points below the log, FedPer {:.2f} below, FedAvg {:.2f} above",
         [-last["local"], -last["fedper"], last["fedavg"]]),
        ("FedPer is {:.1f} and FedAvg {:.1f} below, where FedAvg's single rounds scatter by {:.0f} points.",
         [*(LOGS["last-100-rounds"][method] - statistics.mean(late(run)) for method, run in as_logged.items()),
          statistics.stdev(late(as_logged["fedavg"]))]),
        ("FedPer's four tests are {:.1f} to {:.1f} points higher", [min(gain), max(gain)]),
        ("Local has {:.1f} and FedPer {:.1f} points more than with 0",
         [max(accuracies(local)) - best("local"), max(accuracies(beside_logs()["fedper", "fedper", 0.7])) - best("fedper")]),
        ("All six stand in print's order, {:.1f} to {:.1f} points (best, pooled) below it", [min(lower), max(lower)]),
        ("the five but FedAvg are {:.1f} to {:.1f} points below print.",
         [pick(below(method) for method in column(DRAWN) if method != "fedavg") for pick in (min, max)]),
        ("FedAvg's tests after rounds 100, 200, 300 and 400 have {:.1f}, {:.1f}, {:.1f} and {:.1f}", drawn),
        ("**Fine-tuned FedAvg is {:.1f} points (pooled) below FedOBP**",
         [best("fedobp", of=DRAWN) - best("fedavg", "fine-tuned", DRAWN)]),
        ("and above the four others, not {:.1f} below FedOBP", [apart]),
        ("**Fine-tuned FedAvg ({}) is as good as the best personalized methods but for pFedFDA ({}).**",
         [own["fedavg"][2], own["pfedfda"][2]]),
        ("**FedCAC** gains {:.0f} points over Local", [own["fedcac"][0] - own["local"][0]]),
        *[(f"{name} {{:.1f}}", [_published(name)]) for name in
          ("FedOBP", "FedPer", "pFedFDA", "FedRep", "LG-FedAvg", "FLOCO", "FedDPA", "Local", "FedSelect", "APFL", "FLUTE", "FedAvg",
           "FedALA")],
    ]  # fmt: skip


def _published(name: str) -> float:
    suffix = "" if name == "FedOBP" else f"/{name.lower()}"
    published = presets.all_presets()[f"fedobp/fashion-mnist-dirichlet-0.1{suffix}"].published
    assert published is not None
    return published.mean


def test_every_figure_of_the_prose_comes_from_the_runs() -> None:
    text = results_page._BLOCK.sub("", results_page.PAGE.read_text(encoding="utf-8"))
    prose = " ".join(re.sub(r"```[\s\S]*?```|`[^`\n]*`|\]\([^)]*\)|^#+ .*$", "", text, flags=re.MULTILINE).split())
    for template, values in claims():
        sentence = template.format(*values)
        assert sentence in prose, f"docs/results.md does not say: {sentence}"
        prose = prose.replace(sentence, "")
    prose = SETTINGS.sub("", prose)
    unchecked = [prose[max(0, found.start() - 60) : found.end() + 30] for found in FIGURE.finditer(prose)]
    assert not unchecked, "no claim checks:\n" + "\n".join(unchecked)
