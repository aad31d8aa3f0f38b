"""One example per command, shown in its help, and the groups in which `corolla -h` lists commands."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("run", "demo", "sweep", "presets", "methods"),
    "Look": ("runs", "summary", "compare", "report", "export", "verify", "predict"),
    "Deploy": ("cluster", "node"),
    "Data and state": ("data", "state"),
}
"""Commands by the heading of their group."""

EXAMPLES: Mapping[str, str] = {
    "run": "--set method=fedcac --set fedcac.beta=5 --clients 10",
    "demo": "--output-dir demo",
    "sweep": "digits --output-dir sweep",
    "presets": "'fedobp/fashion-mnist*'",
    "methods": "fedcac",
    "runs": "runs",
    "summary": "runs/mine --json",
    "compare": "runs/mine runs/base --to 80",
    "report": "runs/mine runs/base --output report",
    "export": "runs/mine --client 3 --onnx",
    "verify": "mine-client-3.onnx",
    "predict": "mine-client-3.onnx rows.csv",
    "cluster keys": "lab.yaml",
    "cluster up": "lab.yaml",
    "cluster status": "lab.yaml",
    "cluster logs": "lab.yaml supernode-2",
    "cluster restart": "lab.yaml supernode-2",
    "cluster revoke": "lab.yaml 2",
    "cluster down": "lab.yaml",
    "cluster commands": "lab.yaml --slurm",
    "cluster backup": "lab.yaml lab-monday.tar --runs runs",
    "cluster restore": "lab-monday.tar",
    "cluster admit": "lab.yaml 2 bern.pub",
    "cluster rotate": "lab.yaml 2 bern.pub",
    "node join": "bern",
    "node rotate": "bern",
    "node start": "bern",
    "node peers accept": "bern --peers peers.txt",
    "node approve": "1234567890",
    "node audit": "bern",
    "node application": "",
    "node backup": "bern-monday.tar",
    "node restore": "bern-monday.tar",
    "data prepare": "--set dataset=cifar10",
    "data show": "my-experiment.toml",
    "data verify": "",
    "state list": "",
    "state remove": "3f2a9c4b7d10",
    "state prune": "--older-than 30d --dry-run",
}
"""Arguments of each command's example; "" if it needs none."""


def example(command: str) -> str:
    """Return the complete example of a command, such as "cluster up"."""
    return f"corolla {command} {EXAMPLES[command]}".rstrip()


def group_of(name: str) -> str:
    """Return the heading under which `corolla -h` lists a command."""
    return next(group for group, names in GROUPS.items() if name in names)
