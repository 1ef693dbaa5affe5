# make run: everything, from nothing to published plans.  make test: the tests.  Both set up .venv themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(CURDIR)/.venv
STATE := $(CURDIR)/.shardcore

export PATH := $(VENV)/bin:$(PATH)
export PREFECT_HOME ?= $(STATE)/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

.PHONY: run test setup lint

run: setup
	python -m tasks.services python -m flows.refresh

test: setup
	python -m pytest

lint: setup
	ruff check .

setup: $(VENV)/.ready
	@mkdir -p $(PREFECT_HOME)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]'
	touch $@
