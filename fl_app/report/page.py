"""`corolla report`: one self-contained page about one or more runs, and its pictures as PNG files."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fl_app.errors import UserError
from fl_app.report.arrays import DATA_KEYS, KEY_SETTINGS, Run, differences, read_runs, short, show
from fl_app.report.by_kind import of_run
from fl_app.report.comparison import comparison
from fl_app.report.figures import DPI, Panel, looks
from fl_app.report.kinds import Figure
from fl_app.report.partitions import partitions

PAGE = "report.html"
PICTURES = "report-figures"
SHOWN_FAILURES = 20
BRIEF = 2  # so many settings that differ have a place in the table of results

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f4f2; color: #1b1b1b; font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1104px; margin: 0 auto; padding: 1.5rem 2rem 4rem; background: #fff; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 .6rem; border-bottom: 2px solid #1b1b1b; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { max-width: 52rem; margin: .5rem 0; } figcaption { max-width: 52rem; color: #444; font-size: .93rem; }
figure { margin: 1.2rem 0 2rem; } img { display: block; max-width: 100%; height: auto; margin: .4rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; margin: .8rem 0; }
th, td { padding: .3rem .5rem; text-align: left; border-bottom: 1px solid #d8d8d8; vertical-align: top; }
th { border-bottom: 2px solid #1b1b1b; } th.n { text-align: right; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } td code { white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 9rem; } code { font-size: .92em; overflow-wrap: anywhere; }
.warn { border: 2px solid #d55e00; border-left-width: 10px; background: #fff5ec; padding: .7rem 1rem; margin: 1rem 0; }
.warn p { margin: .2rem 0; max-width: none; }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .4em; }
.mark { color: #a84a00; font-weight: 600; }
@media print { body, main { background: #fff; padding: 0; } figure { break-inside: avoid; } }
"""


def write_report(
    paths: Sequence[Path], output: Path, declared: Mapping[str, Sequence[Figure]] | None = None
) -> tuple[Path, Path]:
    """Write report.html and the folder of pictures into `output`; both replace those of an earlier report.

    paths: run folders, or folders of run folders; declared: figures by method, for runs that did not keep them.
    Returns the page's and the pictures' path.
    Raises UserError naming every path that holds no run, or if `output` cannot be written.
    """
    runs = read_runs(paths, declared)
    shared = [*comparison(runs), *partitions(runs)]
    own = {run.number: list(of_run(run)) for run in runs}
    pictures = output / PICTURES
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for old in pictures.glob("*.png"):
            old.unlink()
        for panel in [*shared, *(panel for panels in own.values() for panel in panels)]:
            (pictures / f"{panel.name}.png").write_bytes(panel.png)
        (output / PAGE).write_text(page(runs, shared, own), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: cannot write into {output}: {error.strerror}") from None
    return output / PAGE, pictures


def page(runs: Sequence[Run], shared: Sequence[Panel], own: dict[int, list[Panel]]) -> str:
    """Return the page. shared: pictures of all runs; own: by run number."""
    names = ", ".join(dict.fromkeys(run.method for run in runs))
    title = f"{len(runs)} runs: {names}" if len(runs) > 1 else f"One run: {names}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>",
        f"<h1>{escape(title)}</h1>", settings_sentence(runs), warnings(runs), results_table(runs), settings_table(runs),
    ]  # fmt: skip
    if shared:
        parts += ["<h2>Pictures</h2>", *map(figure, shared)]
    for run in runs:
        failures = failure_list(run)
        if own[run.number] or failures:
            parts += [f"<h2>{swatch(runs, run)}{escape(short(run.label, 60))}</h2>", *map(figure, own[run.number]), failures]
    parts.append("</main></body></html>\n")
    return "\n".join(part for part in parts if part)


def figure(panel: Panel) -> str:
    """Return a picture with its caption, embedded."""
    data = base64.b64encode(panel.png).decode("ascii")
    width, height = (int.from_bytes(panel.png[at : at + 4], "big") * 100 // DPI for at in (16, 20))  # PNG header, 100 px/inch
    return (
        f'<figure id="{escape(panel.name)}"><h3>{escape(panel.title)}</h3>\n'
        f'<img alt="{escape(panel.title)}" width="{width}" height="{height}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
    )


# Words ----------------------------------------------------------------------------------------------------------------


def settings_sentence(runs: Sequence[Run]) -> str:
    """Return the key settings that all runs have in common."""
    parts = {
        name: run_values.pop()
        for name in KEY_SETTINGS
        if name != "dirichlet-alpha" and len(run_values := {run.value(name) for run in runs}) == 1
    }
    words = [f"{escape(name)} <b>{escape(value)}</b>" for name, value in parts.items()]
    return f"<p>{'All runs: ' if len(runs) > 1 else ''}{', '.join(words)}.</p>" if words else ""


def warnings(runs: Sequence[Run]) -> str:
    """Say what is not as a reader would expect: unfinished runs, unreadable records, failures, unequal conditions."""
    lines = []
    for run in runs:
        name = f"<b>{escape(short(run.label))}</b> (<code>{escape(run.path.name)}</code>)"
        last = max(run.rounds, default=0)
        if not run.finished:
            state = f"the last recorded round is {last} of {run.planned}" if last else "no round is recorded"
            lines.append(f"{name} is not finished: {state}. It was interrupted or is still running; shown is what there is.")
        if run.missing:
            rounds = ", ".join(map(str, run.missing))
            lines.append(
                f"{name}: metrics.jsonl has no readable record of round {rounds}; sums of bytes, seconds and failures lack it."
            )
        if run.failures():
            lines.append(f"{name}: {len(run.failures())} times a client's reply was missing or unusable; see below.")
    data = [key for key in differences(runs) if key in DATA_KEYS]
    if data:
        keys = escape(", ".join(data))
        lines.append(f"The runs do not have the same data ({keys}): their accuracies do not compare directly.")
    return f'<div class="warn">{"".join(f"<p>{line}</p>" for line in lines)}</div>' if lines else ""


def results_table(runs: Sequence[Run]) -> str:
    """Return the table of results."""
    finetuned = any("accuracy-finetuned" in e and e["accuracy-finetuned"] is not None for r in runs if (e := _final(r)))
    brief = 0 < len(differences(runs)) <= BRIEF
    head = ["#run", "method", *(["settings that differ"] if brief else []), "final (%)", "pooled (%)",
            *(["fine-tuned (%)"] if finetuned else []), "best (%)", "best, pooled (%)", "upload",
            "download", "seconds", "rounds", "failures", "#digest"]  # fmt: skip
    rows = [_result_cells(runs, run, finetuned, brief) for run in runs]
    text = (
        "Accuracy on test data. final: mean over all clients, each on its own test data, after the last round; pooled: over "
        "all samples; best: highest mean over rounds, before local training, so it can be below final. upload, download: all "
        "clients together. digest: its first 8 digits; equal digests mean the same final models, bit for bit."
    )
    return f"<h2>Results</h2>{_table(head, rows, numeric_from=3 if brief else 2)}<p>{text}</p>"


def _final(run: Run) -> dict[str, object]:
    last = run.final()
    return last[1] if last else {}


def _result_cells(runs: Sequence[Run], run: Run, finetuned: bool, brief: bool) -> list[str]:
    last = run.final()
    accuracy = {name: last[1].get(name) if last else None for name in ("accuracy", "accuracy-pooled", "accuracy-finetuned")}
    note = f'<br><span class="mark">round {last[0]}</span>' if last and not run.finished else ""
    digest = str((last[1].get("digest") if last and run.finished else None) or "")
    rounds = str(len(run.rounds))
    if not run.finished:
        rounds = f'<span class="mark" title="not finished">{rounds} of {run.planned}</span>'
    settings = escape(", ".join(f"{key} = {show(value)}" for key, value in run.settings.items())) or "–"
    number = f"{run.number} " if len(runs) > 1 else ""
    return [
        f"{swatch(runs, run)}{number}{escape(run.path.name)}", escape(run.method), *([settings] if brief else []),
        percent(accuracy["accuracy"]) + note, percent(accuracy["accuracy-pooled"]) + note,
        *([percent(accuracy["accuracy-finetuned"]) + note] if finetuned else []),
        percent(run.best("accuracy-before")), percent(run.best("accuracy-before-pooled")),
        size(run.total("upload-bytes")), size(run.total("download-bytes")), f"{run.seconds():.1f}",
        rounds, str(len(run.failures())),
        f'<code title="{escape(digest)}">{escape(digest[:8]) or "–"}</code>',
    ]  # fmt: skip


def settings_table(runs: Sequence[Run]) -> str:
    """Return the keys in which the runs differ, if they are too many for the table of results."""
    keys = differences(runs)
    if len(keys) <= BRIEF:
        return ""
    rows = [
        [f"{swatch(runs, run)}{run.number} {escape(run.method)}", *(escape(show(run.settings[k])) if k in run.settings else "–"
                                                                  for k in keys)]
        for run in runs
    ]  # fmt: skip
    return f"<h2>Settings in which the runs differ</h2>{_table(['#run', *keys], rows, numeric_from=len(keys) + 1)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int) -> str:
    """Return a table of ready HTML cells; columns from `numeric_from` on are numbers unless their name starts with #."""
    kinds = ["n" if k >= numeric_from and not name.startswith("#") else "name" if k == 0 else "" for k, name in enumerate(head)]
    top = "".join(f'<th class="{kind}">{escape(name.lstrip("#"))}</th>' for kind, name in zip(kinds, head, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def failure_list(run: Run) -> str:
    """Return the run's failures, the first ones."""
    failures = run.failures()
    if not failures:
        return ""
    items = [
        f"<li>round {t}: client {escape(str(f.get('client')))}: {escape(str(f.get('cause')))}</li>"
        for t, f in failures[:SHOWN_FAILURES]
    ]
    more = f"<p>… and {len(failures) - SHOWN_FAILURES} more in metrics.jsonl</p>" if len(failures) > SHOWN_FAILURES else ""
    return f"<h3>Failures</h3><ul>{''.join(items)}</ul>{more}"


def swatch(runs: Sequence[Run], run: Run) -> str:
    """Return the run's colour in the pictures."""
    return f'<span class="swatch" style="background:{looks(runs)[run.number].colour}"></span>' if len(runs) > 1 else ""


def percent(value: object) -> str:
    """Format a ratio in percent."""
    return f"{100 * value:.2f}" if isinstance(value, (int, float)) else "–"


def size(nbytes: float) -> str:
    """Format bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
