# make run: everything, from nothing to published plans.  make test: the tests (test-long: those of the long-lived stack and
# of failures struck into it; mutants: whether the tests notice defects).  All set up .venv themselves.
# make up, status, down: the long-lived services (docs/operations.md).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Which FBGEMM to install: gpu where there is an NVIDIA driver, else cpu.
EXTRA ?= $(if $(shell command -v nvidia-smi),gpu,cpu)

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

# pip says what fails, and nothing else.
PIP := python -m pip install --quiet --progress-bar off --disable-pip-version-check --root-user-action ignore
SIZE := 2.5 GB$(if $(filter gpu,$(EXTRA)), and CUDA)

.PHONY: run test test-long mutants up status down setup lint

run: setup
	@python -m tasks.services python -m flows.refresh

test: setup
	python -m pytest

test-long: setup
	python -m pytest -m long -n 0

mutants: setup
	python -m bench.mutants --out .mutants.jsonl

up: setup
	@python -m tasks.stack up

status down:
	@python -m tasks.stack $@

lint: setup
	ruff check .

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@echo "Installing PyTorch, FBGEMM, TorchRec, Prefect, Ray, MLflow and DVC into .venv, once: $(SIZE), some minutes"
	@"$(PYTHON)" -m venv .venv
	@$(PIP) --editable '.[$(EXTRA),dev,torchrec]'
	@$(PIP) --no-deps torchrec==1.8.0
	@touch $@
