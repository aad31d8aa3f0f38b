"""`render_chart.py CHART VALUES.yaml...`, run by .venv-charts: renders a chart by Helm's own code, and validates the result.

Prints a JSON list. For each file it has the manifests, each compared strictly with the schemas of VERSIONS, and lint's
findings, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

# the oldest of the chart's kubeVersion, and a new one
VERSIONS = ("1.25", "1.33")


def main() -> None:
    from helm_python.chart import Chart

    chart = Chart.load(sys.argv[1])
    print(json.dumps([render(chart, yaml.safe_load(Path(values).read_text()) or {}) for values in sys.argv[2:]]))


def render(chart: Any, given: dict[str, Any]) -> dict[str, Any]:
    import kubernetes_validate
    from helm_python.chart import lint

    try:
        chart.validate_schema(given)
        rendered = chart.render(given, name="lab", namespace="corolla")
    except Exception as error:
        return {"error": str(error)}
    texts = (manifest for text in rendered.values() for manifest in yaml.safe_load_all(text))
    manifests = [manifest for manifest in texts if manifest]
    for manifest in manifests:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
    messages = lint(sys.argv[1], given, strict=True)["messages"]
    # severity 1 is information: there is no icon
    return {"error": "", "manifests": manifests, "lint": [one for one in messages if one["severity"] > 1]}


if __name__ == "__main__":
    main()
