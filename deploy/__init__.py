"""Real deployments: cluster launcher, certificates and keys, container images."""
