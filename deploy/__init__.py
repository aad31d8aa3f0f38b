"""Real deployments: cluster launcher, certificates and keys, container images."""

from fl_app import earlier_names

earlier_names.accept({"deploy.metrics": "deploy.prometheus", "deploy.processes": "deploy.detached"})
