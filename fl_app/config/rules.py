"""Rules of the run config beyond a single key's range: allowed words, and combinations of keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_app.config import earlier_keys
from fl_app.errors import ConfigurationError, UserError
from fl_app.files import names_are_shown, nearest_path
from fl_app.keys import Scalar, nearest
from fl_app.known_names import (
    BY_COLUMN,
    FIXED_SIZES,
    MODELS,
    OWN_PARTITION,
    PARTITIONS,
    PLATEAU,
    STEP,
    TASKS,
    TRACKERS,
    UNBALANCED,
)
from fl_app.plugins import is_reference, meant
from fl_app.sources import FOLDER, NODE, SOURCES, either, path_in, path_prefixes, source_of, suffix_of

# A run with more than MANY_CLIENTS clients records matrices every SELDOM rounds, unless `record-matrices` is set.
MANY_CLIENTS, SELDOM = 100, 10
# bytes of a run's name: file systems allow 255, and the names of a run's files need some more
LONGEST_NAME = 200

SIMULATED = ("speeds", "availability", "day-length", "drop-rate")
"""Keys that decide who answers when in a simulation."""

# largest SIGMA of `lognormal:SIGMA`: speeds that differ by a factor of 10^4 for each standard deviation
MOST_SIGMA = 10.0
# seconds of a simulated day if `day-length` does not say
DAY = 86400.0
SPEEDS_FILE, LOGNORMAL = "file:", "lognormal:"


def _source_for(dataset: str) -> str:
    """Return the end of an error about a path without a source's prefix, or with an unknown one: the sources that read it.

    A missing file is replaced by the closest name in its directory. Returns "" for a value that is no path, and where
    errors must not name files.
    """
    if not names_are_shown():
        return ""
    prefix, colon, rest = dataset.partition(":")
    path = Path(rest if colon else prefix)
    try:
        if not path.exists():
            path = nearest_path(path) or path
        kind = FOLDER if path.is_dir() and not colon else suffix_of(path)
    except OSError:
        # too long, or in a directory that this account must not read
        return ""
    meant = [f"{source.prefix}:{path}" for source in SOURCES.values() if kind and kind in source.reads]
    return f"; did you mean {either(meant)}?" if meant else ""


def check_words(values: Mapping[str, Scalar], methods: Mapping[str, type], problems: list[UserError]) -> None:
    """Add an error to `problems` for every value that is not among its key's words, references or paths."""

    def refuse(name: str, allowed: tuple[str, ...], more: str = "", prefixes: tuple[str, ...] = ()) -> None:
        value = values[name]
        kind, colon, _ = str(value).partition(":")
        own = meant(kind) if name in ("method", "model", "task") else ""
        hint = f"; did you mean {own}?" if own else nearest(kind + colon, (*allowed, *prefixes))
        problems.append(UserError(key=name, rule=f"must be one of {', '.join(allowed)}{more}", value=value, hint=hint))

    if values["method"] not in methods:
        several = [name.strip() for name in str(values["method"]).split(",")]
        if len(several) > 1 and all(name in methods or is_reference(name) for name in several):
            listed_names = ", ".join(f'"{name}"' for name in several)
            hint = f"; for several, write [grid] and below it method = [{listed_names}] into a file, and run `corolla sweep FILE`"
            problems.append(UserError(key="method", rule="a run has one method", value=values["method"], hint=hint))
        else:
            refuse("method", tuple(methods), " or module:METHOD")
    dataset, partition, model, task = (str(values[name]) for name in ("dataset", "partition", "model", "task"))
    source = SOURCES.get(dataset.removesuffix(":"))
    if not path_in("dataset", dataset) and (source is None or source.path or dataset.endswith(":")):
        words = tuple(name for name, source in SOURCES.items() if not source.path)
        forms = ", ".join(source.form for source in SOURCES.values() if source.path)
        if source is not None and source.path:
            rule = f"{source.prefix} needs its path: {source.form}"
            problems.append(UserError(key="dataset", rule=rule, value=dataset))
        elif ("/" in dataset or Path(dataset).suffix or not nearest(dataset, words)) and (hint := _source_for(dataset)):
            problems.append(UserError(key="dataset", rule="must name a source of data", value=dataset, hint=hint))
        else:
            refuse("dataset", words, f" or {forms}", path_prefixes("dataset"))
    if partition not in (*PARTITIONS, BY_COLUMN) and not path_in("partition", partition):
        refuse("partition", (*PARTITIONS, BY_COLUMN), f" or {OWN_PARTITION}/path.npz", (OWN_PARTITION,))
    if model not in MODELS and not re.fullmatch(r"[\w.]+:\w+", model):
        refuse("model", tuple(MODELS), " or module:factory")
    if task not in TASKS and not re.fullmatch(r"[\w.]+:\w+", task):
        refuse("task", TASKS, " or module:Class")
    for name in split_names(str(values["track"])):
        if name not in TRACKERS:
            rule = f"must be some of {', '.join(TRACKERS)}, with commas"
            problems.append(UserError(key="track", rule=rule, value=name, hint=nearest(name, TRACKERS)))
    for name in split_names(str(values["callbacks"])):
        if not re.fullmatch(r"[\w.]+:\w+", name):
            hint = f"; did you mean {own}?" if (own := meant(name.partition(":")[0])) else ""
            rule = "must be module:Class, several with commas"
            problems.append(UserError(key="callbacks", rule=rule, value=name, hint=hint))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(values["device"])):
        hint = nearest(str(values["device"]), ("auto", "cpu", "cuda"))
        problems.append(
            UserError(key="device", rule="must be auto, cpu, cuda or cuda:k", value=values["device"], hint=hint)
        )
    if not re.fullmatch(r"[\w.+=,@-]*", str(values["run-name"])) or str(values["run-name"]).startswith("."):
        rule = "letters, digits and _.+=,@- only, not starting with a dot"
        problems.append(UserError(key="run-name", rule=rule, value=values["run-name"]))
    if (length := len(str(values["run-name"]).encode())) > LONGEST_NAME:
        start = f": {str(values['run-name'])[:40]}..."
        problems.append(UserError(key="run-name", rule=f"at most {LONGEST_NAME} bytes", value=length, hint=start))
    if not re.fullmatch(rf"constant|cosine|({STEP}|{PLATEAU})[1-9]\d{{0,8}}", str(values["schedule"])):
        rule = f"must be constant, cosine, {STEP}K or {PLATEAU}K, with K rounds of at least 1"
        problems.append(UserError(key="schedule", rule=rule, value=values["schedule"]))
    if values["keep-uploads"] and not upload_interval(str(values["keep-uploads"])):
        rule = "must be `every N`, with N rounds of at least 1, or empty"
        problems.append(UserError(key="keep-uploads", rule=rule, value=values["keep-uploads"]))
    names = split_names(str(values["classes"]))
    if len(set(names)) != len(names):
        problems.append(UserError(key="classes", rule="every name once", value=values["classes"]))
    if dataset == NODE and task == TASKS[0] and len(names) < 2:
        rule = "dataset node needs at least two class names"
        problems.append(UserError(key="classes", rule=rule, value=values["classes"]))


def _without_py(module: str, name: str | None) -> str:
    return f"{module}{name}" if name else meant(module) or f"{module}:NAME"


def refuse_files(raw: Mapping[str, Scalar]) -> None:
    """Raise UserError for a file's name in place of a module's: a search for the module FILE.py would import FILE."""
    found = ((key, re.fullmatch(r"(.+)\.py(:.*)?", str(raw.get(key, "")))) for key in ("method", "model", "task"))
    rule = "must be module:NAME without .py"
    complain(
        [
            UserError(key=key, rule=rule, value=match[0], hint=f"; did you mean {_without_py(match[1], match[2])}?")
            for key, match in found
            if match
        ]
    )


def with_implied(raw: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys that were set, under their current names, and those that they imply.

    `client` implies the partition `by-column`. Many clients imply fewer records of matrices, because these are larger.
    """
    raw = earlier_keys.current(raw)
    implied: dict[str, Scalar] = {}
    if raw.get("client") and "partition" not in raw and raw.get("dataset") != NODE:
        implied["partition"] = BY_COLUMN
    clients = raw.get("num-clients", 0)
    if isinstance(clients, int) and clients > MANY_CLIENTS and "record-matrices" not in raw:
        implied["record-matrices"] = SELDOM
    return {**raw, **implied}


def check_together(values: Mapping[str, Any], problems: list[UserError]) -> None:
    """Add an error to `problems` for every value that contradicts another key's value."""

    def refuse(key: str, rule: str, value: object = None) -> None:
        problems.append(UserError(key=key, rule=rule, value=value))

    if values["min-available-clients"] > values["num-clients"] > 0:
        rule = f"must be at most num-clients ({values['num-clients']})"
        refuse("min-available-clients", rule, values["min-available-clients"])
    if source_of(str(values["dataset"])).has_columns and not values["target"]:
        refuse("target", f"{values['dataset']} needs the name of the column to learn")
    if values["tokenizer"] and values["dataset"] == NODE:
        refuse("tokenizer", "must be empty with dataset node: a site's own texts are not read", values["tokenizer"])
    if values["partition"] == BY_COLUMN and not values["client"]:
        refuse("client", "partition by-column needs the name of the column that names each sample's client")
    sizes = {name: values[name] for name in ("train-samples", "test-samples")}
    if sizes["test-samples"] < 0 and values["partition"] in set(FIXED_SIZES) - {"pathological"}:
        refuse("test-samples", f"must be >= 0 with partition {values['partition']}", sizes["test-samples"])
    unbalanced = values["pathological-assignment"] == UNBALANCED and values["partition"] == "pathological"
    if unbalanced and list(sizes.values()) != [0, -1]:
        told = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        rule = f"{UNBALANCED} divides all samples: it needs train-samples = 0 and test-samples = -1, not {told}"
        refuse("pathological-assignment", rule)
    hidden = [name for name in ("private", "dp-epsilon") if values[name]]
    if values["normalize-over"] == "sites" and hidden and values["dataset"] == NODE:
        why = "because each site would send the server sums over its training data"
        refuse("normalize-over", f"must be site or auto with {hidden[0]}, {why}", "sites")
    if values["test-after"] and hidden:
        why = "because the number of rows after a value tells of a site's rows"
        refuse("test-after", f"must be empty with {hidden[0]}, {why}", values["test-after"])
    if values["normalize-over"] == "initial" and not values["initial-weights"] and not values["from-run"]:
        refuse("normalize-over", "initial needs initial-weights or --from, for the mean and std of that model")
    if values["from-run"] and values["initial-weights"]:
        refuse("initial-weights", "a run that goes on from another one has its models; leave it unset")
    if values["keep-uploads"] and values["private"]:
        rule = "the server of a private run sees no single upload; leave it empty"
        refuse("keep-uploads", rule, values["keep-uploads"])
    if values["optimizer"] != "sgd" and values["momentum"]:
        refuse("momentum", f"{values['optimizer']} has its own moments; leave it 0", values["momentum"])
    if values["precision"] == "float16" and values["dp-epsilon"]:
        refuse("precision", "each record's gradient is clipped, and float16 scales them; take bfloat16", "float16")
    if values["frozen-dtype"] == "bfloat16" and not values["train"]:
        refuse("frozen-dtype", "needs train, the patterns of what trains", "bfloat16")
    if values["gradient-checkpointing"] and values["dp-epsilon"]:
        rule = "dp-epsilon takes each record's gradient once, and layers would run twice; leave it false"
        refuse("gradient-checkpointing", rule, True)
    if values["local-steps"] and values["dp-epsilon"]:
        refuse("local-steps", "a privacy budget is planned for local-epochs; leave it 0", values["local-steps"])
    if str(values["schedule"]).startswith((STEP, PLATEAU)) and values["learning-rate-decay"] == 1:
        refuse("schedule", "needs learning-rate-decay, the factor after each step", values["schedule"])
    if str(values["schedule"]).startswith(PLATEAU) and not values["report-accuracy"]:
        refuse("schedule", "with report-accuracy = false clients send no loss", values["schedule"])
    if str(values["schedule"]).startswith(PLATEAU) and values["dp-epsilon"] and not values["validation-ratio"]:
        rule = "needs validation-ratio, because clients with a privacy budget send no training loss"
        refuse("schedule", rule, values["schedule"])
    if values["keep-best"]:
        for name in ("validation-ratio", "evaluate-every", "report-accuracy"):
            if not values[name]:
                refuse("keep-best", f"needs {name}, to judge rounds by", True)
    if values["initial-weights"] and not Path(str(values["initial-weights"])).is_absolute():
        refuse("initial-weights", "must be an absolute path", values["initial-weights"])
    if values["initial-weights-partial"] and not values["initial-weights"]:
        refuse("initial-weights-partial", "needs initial-weights, the file to take tensors from")
    check_timing(values, refuse)


def check_client(values: Mapping[str, Any], problems: list[UserError]) -> None:
    """Add an error to `problems` if `client` names a column but another partition than `by-column` would ignore it."""
    client, partition = values["client"], values["partition"]
    if client and partition != BY_COLUMN and values["dataset"] != NODE:
        rule = f"must be {BY_COLUMN} if client = {client!r} is set"
        hint = f"; leave partition unset, or leave client unset (exclude = {client!r} if the column is no feature)"
        problems.append(UserError(key="partition", rule=rule, value=partition, hint=hint))


def upload_interval(value: str) -> int:
    """Return the rounds between kept uploads (`keep-uploads`); 0 if none are kept, or if the text has another form."""
    found = re.fullmatch(r"\s*every\s+(\d+)\s*", value, re.ASCII)
    return int(found[1]) if found else 0


def split_names(value: str) -> tuple[str, ...]:
    """Return the items of a value with commas: class names, columns, patterns, metrics."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def complain(problems: Sequence[UserError]) -> None:
    """Raise ConfigurationError with all problems, if there are any."""
    if problems:
        first, text = problems[0], "invalid configuration:\n" + "\n".join(f"  {p}" for p in problems)
        error = ConfigurationError(text, key=first.key, rule=first.rule, value=first.value)
        error.problems = tuple(problems)
        raise error


def sigma_of(speeds: str) -> float | None:
    """Return SIGMA of `lognormal:SIGMA`; None for text of another form."""
    found = re.fullmatch(rf"{LOGNORMAL}(\d+(?:\.\d*)?)", speeds, re.ASCII)
    return float(found[1]) if found and float(found[1]) <= MOST_SIGMA else None


def check_timing(values: Mapping[str, Any], refuse: Callable[[str, str, object], None]) -> None:
    """Refuse every value of these keys that is malformed, or contradicts another key's value. refuse: takes key, rule and value."""
    speeds = str(values["speeds"])
    path = speeds.removeprefix(SPEEDS_FILE) if speeds.startswith(SPEEDS_FILE) else ""
    if path and not Path(path).is_absolute():
        refuse("speeds", "must be an absolute path", path)
    elif not path and speeds != "none" and sigma_of(speeds) is None:
        refuse("speeds", f"must be none, {LOGNORMAL}SIGMA (at most {MOST_SIGMA:g}) or {SPEEDS_FILE}speeds.csv", speeds)
    if path and values["availability"] != 1:
        rule = "the file of speeds sets the clients' hours (from, until) or none; leave it at 1"
        refuse("availability", rule, values["availability"])
    early = values["quorum"] < 1 or values["round-deadline"] > 0
    if values["quorum"] < values["min-results"]:
        refuse("quorum", f"must be at least min-results ({values['min-results']:g})", values["quorum"])
    if values["staleness"] and not early:
        refuse("staleness", "nobody is late without quorum below 1 or a round-deadline; set one", values["staleness"])
    if values["private"] and early:
        rule = "a private run's sums need every client that was asked, so no round can close early; leave it at its default"
        for name, none in (("quorum", 1), ("round-deadline", 0), ("staleness", 0)):
            if values[name] != none:
                refuse(name, rule, values[name])
    for name, default in (("availability", 1.0), ("day-length", DAY), ("drop-rate", 0.0)):
        if values[name] != default and speeds == "none":
            refuse(name, "it is about simulated time, which needs speeds", values[name])
