# Everything runs from .venv in this folder. A target sets it up when pyproject.toml or constraints.txt have changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Idle OpenMP threads sleep instead of spinning: with two libraries on two cores, spinning costs more than it saves.
export OMP_WAIT_POLICY = PASSIVE
export RAY_USAGE_STATS_ENABLED = 0
export MLFLOW_DISABLE_TELEMETRY = true

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint clean

help:
	@echo 'make demo   train, compare, register and stream on an embedded sample'
	@echo 'make test   run the tests'
	@echo 'make bench  add the benchmark peers to .venv and list the benchmarks'
	@echo 'make lint   ruff, mypy and the direction of imports'

demo: $(VENV)/native
	$(BIN)/tethys demo

test: $(VENV)/native
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy kernels titans_core connectors pipelines

bench: $(VENV)/installed-bench
	@echo 'The peers are in $(VENV). Run one claim at a time, for example:'
	@for script in $$(grep -l '__main__' benchmarks/*.py); do echo "  $(BIN)/python $$script --help"; done

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'No python3 found: install Python 3.11 or newer, or say make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is older than 3.11: say make PYTHON=/path/to/python3.11' >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# The constraints hold torch at one release; without them a resolver takes the newest, several gigabytes of it.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Built ahead of time, never when a service starts; built again when its sources change.
$(VENV)/native: $(VENV)/installed $(wildcard kernels/native/*.h kernels/native/*.cpp kernels/native/build.py)
	@$(BIN)/python -m kernels.native.build || echo 'The native kernels were not built; torch computes the same numbers, slower (tethys doctor).' >&2
	@touch $@

$(VENV)/installed-bench: $(VENV)/native
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
