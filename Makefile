# All commands set up .venv themselves.
# make run: everything, from nothing to published plans.
# make demo: the same in about five minutes, with shipped data, in a clone of its own (.demo/).
# make test: the tests.  make test-long: slow ones, and those of the stack, of servers, clusters and failures.
# make mutants ROOM=step: the mutation score of a room.
# make figures: all figures of docs/benchmarks again, some 14 hours.
# make reproduce: the headlines within 15 minutes, each with a verdict.
# make docs: the documentation site, in site/.  make screenshots: pictures of a run's pages.
# make up, status, down: the long-lived services (docs/operations.md).
# make release: sdist and wheel in dist/, checked in a bare environment.
# make minimum: the wheel at the lowest versions allowed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Defects that `make mutants` draws.
MUTANTS ?= 40
# Which FBGEMM to install: the GPU's where there is an NVIDIA driver, else the CPU's.
EXTRA ?= $(if $(shell command -v nvidia-smi),measure-gpu,measure)
# What installs: uv (and pip where uv cannot), or pip.
INSTALLER ?= uv

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

SIZE := 2.2 GB$(if $(filter measure-gpu,$(EXTRA)), and CUDA)

.PHONY: run demo test test-long mutants figures reproduce docs screenshots up status down release minimum setup lock lint

run: setup
	@python -m tasks.services python -m flows.refresh

demo: setup
	@python -m tasks.demo
	@cd .demo && PYTHONPATH=$(CURDIR)/.demo python -m tasks.services python -m flows.refresh --params demo.yaml --open

test: setup
	python -m pytest

test-long: setup
	python -m pytest -n 3 -m long

mutants: setup
	python tests/mutants.py $(ROOM) --mutants $(MUTANTS)

figures: setup
	python -m bench.figures

reproduce: setup
	python -m bench.figures --headlines

# Code of the pages runs first. The site needs no network to be built or read: site/index.html.
docs: .venv/.docs
	python -m pytest -n 0 -m "long or not long" \
		tests/test_docs.py tests/test_examples.py tests/test_site.py tests/search/test_neuroshard_page.py
	@python -m docs.tools.blocks
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build  # with --quiet it would not count warnings, which fail it
	@echo "site/index.html"

# Of the stack's pages, beside a run that measures: make up, then prefect deployment run refresh/local.
screenshots: setup
	@[ -f .stack/env.sh ] && . .stack/env.sh; python -m docs.tools.screenshots

up: setup
	@python -m tasks.stack up

status down:
	@python -m tasks.stack $@

release: setup
	@python .ci/release.py

minimum: setup
	@python .ci/release.py --resolution lowest-direct

lint: setup
	ruff check .
	ruff format --check .
	pyright
	python .ci/sizes.py

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt install.py
	@echo "Installing PyTorch, FBGEMM, TorchRec, Prefect, Ray, MLflow and DVC into .venv, once: $(SIZE)"
	@"$(PYTHON)" -m venv .venv
	@python install.py --installer $(INSTALLER) $(EXTRA) pipeline dev torchrec
	@touch $@

.venv/.docs: .venv/.ready
	@python install.py --installer $(INSTALLER) docs
	@touch $@

# After a change of versions in pyproject.toml: rm -r .venv, > constraints.txt, make setup docs, make test, then this.
lock:
	@python install.py --lock
