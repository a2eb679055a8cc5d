# `make serve` and `make test` are all a newcomer needs; both set everything up first.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup serve test check test-integration test-gpu format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv, install what constraints.txt pins, fetch the default model

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	$(BIN)/holdfast models pull
	touch $@

serve: $(READY) ## talk to the default model in the terminal
	$(BIN)/holdfast chat

test: $(READY) ## every test that fits a laptop, the real default model included
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report= --cov-fail-under=0

check: $(READY) ## lint, types, import rules, coverage of the last `make test`
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/coverage report

test-integration: $(READY) ## everything, thoroughly, with a JUnit report
	mkdir -p build/reports
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --junit-xml=build/reports/integration.xml

test-gpu: ## on a machine with a CUDA device, with its own python3: needs torch, transformers, safetensors, numpy
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu

format: $(READY) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
