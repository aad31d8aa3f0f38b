"""Real deployments: cluster launcher, certificates and keys, container images."""

from fl_app import earlier_names as earlier_names
