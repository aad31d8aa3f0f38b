# Two commands on a fresh machine: `make run` and `make test`. Each sets everything up first. `make help` lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

NEXT := .venv-next
CHARTS := .venv-charts

# the version of Flower: make install FLOWER=1.42; constraints/ has the packages of each
FLOWER ?= 1.39
FLOWERS := $(sort $(patsubst constraints/flwr-%.txt,%,$(wildcard constraints/flwr-*.txt)))
ifeq ($(filter $(FLOWER),$(FLOWERS)),)
  $(error FLOWER: must be one of $(FLOWERS), got $(FLOWER))
endif
LOCK := constraints/flwr-$(FLOWER).txt
RUNNING := $(VENV)/.running-$(FLOWER)
INSTALLED := $(VENV)/.installed-$(FLOWER)
OTHERS = $(filter-out $(RUNNING) $(INSTALLED),$(wildcard $(VENV)/.running-* $(VENV)/.installed-*))
NEWER := .venv-$(lastword $(FLOWERS))
WITH_NEWER := COROLLA_NEXT=$(CURDIR)/$(NEWER)/bin/python

.PHONY: install help run test test-long test-processes test-faults test-nightly test-hostile test-next test-newer test-pythons test-docker test-charts cluster-demo cluster-demo-monitored soak bench bench-short check lint types \
  docs site site-serve wheel clean lock

install: $(INSTALLED) ## into .venv, with all extras and what development needs; FLOWER=1.42: with that version of Flower

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# the clone, with all packages of a file that has their hashes (PyTorch among them: up to 5 GB, minutes)
define into_venv
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer is needed, this is " + sys.version)'
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes --requirement $(1)
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
endef

$(INSTALLED): pyproject.toml $(LOCK)
	$(call into_venv,$(LOCK))
	@rm -f $(OTHERS)
	@touch $@ $(RUNNING)

# what running needs, and no more
$(RUNNING): pyproject.toml $(LOCK) constraints/run.txt
	@mkdir -p build
	@$(PYTHON) deploy/requirements.py $(LOCK) constraints/run.txt > build/run.txt
	$(call into_venv,build/run.txt)
	@rm -f $(OTHERS)
	@touch $@

# versions that a file has stay; UPGRADE=--upgrade takes the newest. image.txt, run.txt: the names of the packages in the container image,
# and of those that `make run` installs; the other files have their hashes. build.txt: the tools of the image's build.
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --no-annotate --quiet
HASHED = $(COMPILE) --generate-hashes --custom-compile-command "make lock" $(UPGRADE) --output-file
NAMED = $(COMPILE) pyproject.toml --extra all --no-header --constraint constraints/flwr-$$version.txt
SORTED := sed 's/[ =;].*//' | sort -u
lock: install ## constraints/: the packages of each version of Flower, with hashes
	@for version in $(FLOWERS); do \
	  echo "flwr==$$version.*" > $(VENV)/flower.in; \
	  $(HASHED) constraints/flwr-$$version.txt pyproject.toml --extra dev --constraint $(VENV)/flower.in || exit 1; \
	done
	@printf 'editables\nhatchling\n' > $(VENV)/editable.in
	@for version in $(FLOWERS); do $(NAMED) || exit 1; done | $(SORTED) > $(VENV)/image.txt
	@for version in $(FLOWERS); do $(NAMED) $(VENV)/editable.in || exit 1; done | $(SORTED) > $(VENV)/run.txt
	@mv $(VENV)/image.txt $(VENV)/run.txt constraints
	@printf 'cyclonedx-bom\nhatchling\n' > $(VENV)/build.in
	@$(HASHED) constraints/build.txt $(VENV)/build.in
	@printf 'helm-python-sdk\nkubernetes-validate\n' > $(VENV)/charts.in
	@$(HASHED) constraints/charts.txt $(VENV)/charts.in

run: $(RUNNING) ## install what running needs, then compare three methods on digits
	$(BIN)/corolla demo

# first what is quick, then what needs no Flower processes either, both on up to four cores with a thread each and a file at a time,
# so that what its tests share is made once, then what starts them; a part that fails keeps none of the others from running
MINUTES := tests/pages tests/experiments tests/methods tests/report tests/api tests/tracking tests/test_all_methods.py studies/tests
QUICK := tests --ignore tests/e2e $(MINUTES:%=--ignore %)
UNIT := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
# three files at a time: such tests wait more than they compute
WAITING := $(BIN)/python -m pytest -n 3 --dist loadfile -rs --durations 15
unexport PYTHONDONTWRITEBYTECODE # the processes that tests start would compile everything anew

test: SHELL := /bin/bash
test: install ## the tests, and the seconds of each part
	@failed=0; \
	echo "1/3: what is quick"; TIMEFORMAT="1/3: %0R s"; time $(UNIT) $(QUICK) || failed=1; \
	echo "2/3: methods, reports, whole runs"; TIMEFORMAT="2/3: %0R s"; time $(UNIT) $(MINUTES) || failed=1; \
	echo "3/3: what starts Flower's processes"; TIMEFORMAT="3/3: %0R s"; time $(WAITING) --no-loadscope-reorder tests/e2e || failed=1; \
	exit $$failed

# minutes of real Flower processes: every method in simulation, launched clusters
test-long: install ## minutes of real Flower processes
	@failed=0; $(UNIT) -m "long and not nightly" --ignore tests/e2e || failed=1; \
	$(WAITING) -m "long and not nightly" tests/e2e || failed=1; exit $$failed

# test-long, test-faults and test-hostile, as continuous integration runs them: three files at a time from the first to the last
test-processes: install ## test-long, test-faults and test-hostile
	@failed=0; $(UNIT) -m "long and not nightly" --ignore tests/e2e || failed=1; \
	$(WAITING) -m "(long or faults or hostile) and not nightly" tests/e2e tests/hostile || failed=1; exit $$failed

# deployments whose processes are killed and whose network is cut (as root; says so otherwise)
test-faults: install ## deployments whose processes are killed and whose network is cut
	$(WAITING) -m "faults and not nightly" tests/e2e

# the rest of both: every method in simulation, every preset, longer cuts, leaks, twelve months; with the newer Flower alone: equal bits,
# who must not get in; hours
ALONE := test_same_bits test_security
test-nightly: $(NEWER)/.installed ## the rest of both, hours
	$(UNIT) -m nightly --ignore tests/e2e
	$(WITH_NEWER) $(BIN)/python -m pytest -m nightly -rs tests/e2e
	$(NEWER)/bin/python -m pytest -m "long or nightly" -rs $(ALONE:%=tests/e2e/%.py)
	$(BIN)/python -m tests.matrix

# the newest Flower, in an environment of its own on top of this one's other packages: unit tests there, a deployment, what another
# machine reaches of its SuperLink, and digests of both
test-next: install ## with the newest Flower, in an environment of its own
	test -x $(NEXT)/bin/python || $(BIN)/python -m venv $(NEXT)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(NEXT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pinned.pth"
	$(NEXT)/bin/python -m pip install --quiet --upgrade 'flwr[simulation]'
	$(NEXT)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(NEXT)/bin/python -m pytest tests/fl_app/test_wire.py tests/fl_app/test_flower_patches.py \
	  tests/server/test_exchange.py tests/server/test_client_registry.py tests/deploy tests/flower
	$(NEXT)/bin/python -m pytest -rs tests/e2e/test_same_bits.py
	COROLLA_NEXT=$(CURDIR)/$(NEXT)/bin/python $(BIN)/python -m pytest -m "next or long" -rs tests/e2e/test_next.py tests/e2e/test_fleet_port.py

# the quick tests, and equal digests, on other versions of Python; one without an interpreter is named
PYTHONS ?= 3.12 3.13
test-pythons: install ## the quick tests and equal digests on Python 3.12 and 3.13
	$(BIN)/python -m tests.pythons $(PYTHONS) -- -n auto --maxprocesses 4 $(QUICK)

# in an environment with that Flower, on top of this one's other packages
$(NEWER)/.installed: constraints/flwr-$(lastword $(FLOWERS)).txt | install
	$(BIN)/python -m venv --without-pip $(NEWER)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(NEWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
	$(NEWER)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement $<
	$(NEWER)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# a cluster that goes from one version to the other and back, with equal bits; then the newer one alone
test-newer: $(NEWER)/.installed ## deployments with 1.39 and the newest Flower of constraints/
	$(WITH_NEWER) $(BIN)/python -m pytest -m "long and not nightly" -rs tests/e2e/test_versions.py
	$(NEWER)/bin/python -m pytest -n 2 tests/deploy/test_gate.py tests/deploy/test_unanswered.py tests/flower

# every attack of tests/hostile/catalogue.py; the results are in hostile.json, `python -m tests.hostile.table` makes
# attacks.md there, a page of the site
test-hostile: install ## every attack of tests/hostile/catalogue.py
	$(WAITING) -m hostile tests/hostile

# clusters in containers; needs a Docker engine, says so without one
test-docker: install ## clusters in containers
	$(BIN)/python -m pytest -m "docker and not nightly" -rs

# deploy/helm, rendered by Helm's own code and compared with Kubernetes's schemas, in an environment of its own (350 MB)
test-charts: install ## the Helm chart, rendered and validated
	@test -x $(CHARTS)/bin/python || $(PYTHON) -m venv $(CHARTS)
	@if $(CHARTS)/bin/python -m pip install --quiet --require-hashes -r constraints/charts.txt; then \
	  $(BIN)/python -m pytest -rs tests/deploy/test_chart.py; \
	else \
	  echo "make test-charts did not run: its packages cannot be installed here"; \
	fi

# SuperLink and four SuperNodes in containers: build, up, FedCAC on digits, table, down
cluster-demo: ## SuperLink and four SuperNodes in containers
	deploy/demo.sh

cluster-demo-monitored: ## the same with Prometheus and a Grafana dashboard
	deploy/demo.sh --monitored

# 20 SuperNodes for 20 rounds: memory stays flat, nothing is left running
soak: install ## 20 SuperNodes for 20 rounds
	COROLLA_SOAK_CLIENTS=20 COROLLA_SOAK_ROUNDS=20 $(BIN)/python -m pytest -m nightly -k leak -s tests/e2e

# ratios of benchmarks/README.md; about half an hour on two idle cores
bench: install ## the ratios of benchmarks/README.md, half an hour
	for name in kernels privacy training client_cost methods simulation deployment startup confine memory adapters scale gpu_check; do $(BIN)/python -m benchmarks.$$name || exit 1; done

BENCHES ?= kernels privacy training simulation deployment startup confine memory scale
# small forms; fail when a ratio is more than twice its target, and is so again: a slow moment passes, a slow program does not
bench-short: install ## their small forms
	for name in $(BENCHES); do \
	  $(BIN)/python -m benchmarks.$$name --short || $(BIN)/python -m benchmarks.$$name --short || exit 1; done

check: lint types test ## lint, types and tests

lint: install ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy
	$(BIN)/mypy

# the reference, and the tables and pictures of the results; what it writes into pyproject.toml is the run config's defaults, which need no new installation
docs: install ## the reference of keys, and the tables and pictures of the results
	$(BIN)/corolla reference
	$(BIN)/python -m studies.results_page
	touch $(INSTALLED) $(RUNNING)

# build/site: pages for a browser, with a search; a broken link or anchor ends it. NO_MKDOCS_2_WARNING: a notice of the theme's authors
site: install ## the documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

site-serve: install ## the site on this machine, built anew when a page changes
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs serve

# dist/corolla-*.whl, for an environment without a clone; nothing needs to be installed here
wheel: ## dist/corolla-*.whl
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove the environments and what was built
	rm -rf $(VENV) .venv-* build dist *.egg-info
