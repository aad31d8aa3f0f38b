"""The Helm chart: rendered, valid for Kubernetes, and as closed as the image and `confine` allow."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import commands, site

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy" / "helm"
PYTHON = Path(os.environ.get("COROLLA_CHARTS", ROOT / ".venv-charts")) / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no Helm here: `make test-charts` installs it")


FILES = ("values.yaml", "examples/server.yaml", "examples/site.yaml")
REFUSED = {
    "superlink: {enabled: false}\nsupernodes: [{name: a, client: 0, clients: 1, keysSecret: k}]": "superlinkAddress",
    "supernodes: [{name: A_b, client: 0, clients: 1, keysSecret: k}]": "does not match pattern",
    "supernodes: [{name: a, client: 0, clients: 1}]": "keysSecret",
    "supernodes: [{name: a, client: 0, clients: 1, keysSecret: k, gpu: 1}]": "gpu",
    "supernodes: [{name: a, client: 0, clients: 1, keysSecret: k, site: ''}]": "does not match pattern",
    "supernodes: [{name: a, client: 0, clients: 1, keysSecret: k, dataPath: 'a\" b'}]": "does not match pattern",
}


@cache
def outputs() -> list[dict[str, Any]]:
    """Return the outcomes of FILES and of REFUSED, in order: one process, which loads Helm once."""
    with tempfile.TemporaryDirectory() as directory:
        refused = [Path(directory) / f"{number}.yaml" for number in range(len(REFUSED))]
        for path, values in zip(refused, REFUSED, strict=True):
            path.write_text(values)
        script = Path(__file__).with_name("render_chart.py")
        command = [PYTHON, script, CHART, *(CHART / name for name in FILES), *refused]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def rendered(name: str) -> dict[str, dict[str, Any]]:
    """Return the manifests of one of FILES, by kind and name. They are valid, and lint finds nothing."""
    found = outputs()[FILES.index(name)]
    assert not found["error"] and not found["lint"], found
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found["manifests"]}


def pods() -> Iterator[dict[str, Any]]:
    for name in FILES:
        for one in rendered(name).values():
            if "template" in one.get("spec", {}):
                yield one["spec"]["template"]["spec"]


def test_what_each_release_has() -> None:
    server = {"Service/lab-superlink", "Service/lab-superlink-metrics", "StatefulSet/lab-superlink"}
    assert set(rendered("values.yaml")) == {*server, "ConfigMap/lab-superlink", "NetworkPolicy/lab-superlink"}
    assert rendered("examples/server.yaml")["Service/lab-superlink"]["spec"]["type"] == "LoadBalancer"
    kinds = ("Deployment", "PersistentVolumeClaim", "ConfigMap", "NetworkPolicy")
    assert set(rendered("examples/site.yaml")) == {f"{kind}/lab-clinic-a" for kind in kinds}


def test_every_container_is_closed() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        # as the image's, and with the calls of Landlock
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"] + pod["initContainers"]:
            closed = container["securityContext"]
            assert closed["readOnlyRootFilesystem"] and not closed["allowPrivilegeEscalation"]
            assert closed["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]} | {"results"}


def test_the_superlinks_control_port_is_on_loopback_and_its_results_on_a_volume() -> None:
    stateful = rendered("values.yaml")["StatefulSet/lab-superlink"]["spec"]
    link = stateful["template"]["spec"]["containers"][0]
    words = [*link["command"], *link["args"]]
    assert words[words.index("--host") + 1] == "127.0.0.1" and "--enable-supernode-auth" in words
    assert words[words.index("--database") + 1].startswith("/results/")
    assert {"name": "results", "mountPath": "/results"} in link["volumeMounts"]
    assert [claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]] == ["results"]
    # kubelet cannot reach the loopback: a command of the image asks
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = link[probe]["exec"]["command"]
        assert asked[:4] == ["python", "-P", "-m", "deploy.health"] and asked[4] == "https://127.0.0.1:8000/health"
    # the compose file's options, which run in test-docker
    compose = yaml.safe_load((ROOT / "deploy" / "compose.tls.yaml").read_text())
    options = compose["services"]["superlink"]["command"][2].partition("-- ")[2].split()
    assert sorted(link["args"]) == sorted(options)


def test_nothing_else_is_reached_over_the_network() -> None:
    link = rendered("values.yaml")["NetworkPolicy/lab-superlink"]["spec"]
    assert link["policyTypes"] == ["Ingress", "Egress"] and not link["egress"]
    assert [rule["ports"] for rule in link["ingress"]] == [
        [{"port": 9092, "protocol": "TCP"}],
        [{"port": 9101, "protocol": "TCP"}],
    ]
    assert "from" not in link["ingress"][0] and link["ingress"][1]["from"] == [{"podSelector": {}}]
    site = rendered("examples/site.yaml")
    node = site["NetworkPolicy/lab-clinic-a"]["spec"]
    assert node["policyTypes"] == ["Ingress", "Egress"] and not node["ingress"]
    assert [{port["port"] for port in rule["ports"]} for rule in node["egress"]] == [{53}, {9092}]
    # each policy is for the pods of its own release and component
    labels = site["Deployment/lab-clinic-a"]["spec"]["template"]["metadata"]["labels"]
    assert node["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_sites_supernode() -> None:
    found = rendered("examples/site.yaml")
    deployment = found["Deployment/lab-clinic-a"]["spec"]
    assert deployment["replicas"] == 1 and deployment["strategy"] == {"type": "Recreate"}
    node = deployment["template"]["spec"]["containers"][0]
    assert node["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert node["args"][node["args"].index("--superlink") + 1] == "superlink.example.org:9092"
    assert node["args"][-1] == commands.node_config(2, 3, "/site-data/xray.npz", "/keys/supernode.x25519")
    # its private keys are copied with mode 600, which Corolla asks for
    (copy,) = deployment["template"]["spec"]["initContainers"]
    assert copy["command"] == ["sh", "-c", "install -m 600 /secret/* /keys/"]


def test_a_sites_rules_are_rules(tmp_path: Path) -> None:
    rules = rendered("examples/site.yaml")["ConfigMap/lab-clinic-a"]["data"]["site.toml"]
    (tmp_path / "site.toml").write_text(rules)
    found = site.read_site(tmp_path / "site.toml")
    assert found.confine and found.methods == ("fedcac", "fedobp")
    assert tomllib.loads(rules) == tomllib.loads(
        yaml.safe_load((CHART / "examples" / "site.yaml").read_text())["supernodes"][0]["site"]
    )


@pytest.mark.parametrize("number, words", list(enumerate(REFUSED.values())))
def test_values_that_are_refused(number: int, words: str) -> None:
    assert words in outputs()[len(FILES) + number]["error"]
