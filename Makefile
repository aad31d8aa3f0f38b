# Two commands on a fresh machine: `make run` and `make test`. Each sets everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install run test check lint types docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: install
	$(BIN)/corolla demo

test: install
	$(BIN)/python -m pytest

check: lint types test

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

docs: install
	$(BIN)/corolla reference

clean:
	rm -rf $(VENV) *.egg-info
