# Two commands on a fresh machine: `make run` and `make test`. Each sets everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install run test test-long test-faults test-docker cluster-demo soak bench bench-short check lint types docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: install
	$(BIN)/corolla demo

# first what needs no Flower processes, on up to four cores, then what starts them, one after the other
test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --ignore tests/e2e
	$(BIN)/python -m pytest tests/e2e

# minutes of real Flower processes: every method in simulation, launched clusters
test-long: install
	$(BIN)/python -m pytest -m long -n auto --maxprocesses 4 --ignore tests/e2e
	$(BIN)/python -m pytest -m long tests/e2e

# deployments whose processes are killed and whose network is cut (as root; says so otherwise)
test-faults: install
	$(BIN)/python -m pytest -m faults -rs

# clusters in containers; needs a Docker engine, says so without one
test-docker: install
	$(BIN)/python -m pytest -m docker -rs

# SuperLink and four SuperNodes in containers: build, up, FedCAC on digits, table, down
cluster-demo:
	deploy/demo.sh

# 20 SuperNodes for 20 rounds: memory stays flat, nothing is left running
soak: install
	COROLLA_SOAK_CLIENTS=20 COROLLA_SOAK_ROUNDS=20 $(BIN)/python -m pytest -m faults -k leak -s

# ratios of docs/performance.md; about half an hour on two idle cores
bench: install
	for name in kernels training methods simulation deployment startup memory gpu_check; do $(BIN)/python -m benchmarks.$$name || exit 1; done

# small forms; fail when a ratio is more than twice its target
bench-short: install
	for name in kernels training simulation deployment startup memory; do $(BIN)/python -m benchmarks.$$name --short || exit 1; done

check: lint types test

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

docs: install
	$(BIN)/corolla reference

clean:
	rm -rf $(VENV) *.egg-info
