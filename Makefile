# `make serve` and `make test` are all a newcomer needs; both set everything up first.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NODE_READY := sdks/typescript/node_modules/.ready
VOCABULARIES := tests/vocabularies/node_modules/.ready
TEST_WORKERS ?= 2

.PHONY: help setup serve chat test sdk-suites proto check test-integration test-gpu bench-gpu test-mlx test-vllm test-sglang format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv, install what constraints.txt pins, fetch the default model

$(READY): pyproject.toml constraints.txt sdks/python/pyproject.toml hatch_build.py $(wildcard src/holdfast/engine/native/*.cpp src/holdfast/engine/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[torch,mlx,dev]' -e sdks/python
	$(BIN)/holdfast models pull
	touch $@

serve: $(READY) ## serve the default model: gRPC and OpenAI sessions
	$(BIN)/holdfast serve

chat: $(READY) ## talk to the default model in the terminal
	$(BIN)/holdfast chat

# One compute thread a worker: two of them beat two threads, and streams in tests stay responsive.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) -q
COVERED := --cov --cov-report= --cov-fail-under=0
# On a busy machine a test can fail because of its neighbours. CI tries such tests once more, one after the other, and says so.
AGAIN := (echo "CI: what failed is tried once more, alone"; $(BIN)/python -m pytest -q -m "not slow" --last-failed --last-failed-no-failures none $(COVERED) --cov-append)

CHROMIUM := $(or $(shell command -v chromium),$(shell command -v chromium-browser),$(shell command -v google-chrome))

test: $(READY) $(NODE_READY) $(VOCABULARIES) ## every test that fits a laptop: engine, doors, both SDKs, the real default model
	@$(if $(CHROMIUM),,echo "no Chromium on the PATH: the console's browser tests are skipped (apt-get install chromium)")
	$(PYTEST) -m "not slow" $(if $(CI),$(COVERED) || $(AGAIN))
	$(BIN)/python sdks/conformance/run.py $(MAKE) --no-print-directory sdk-suites

sdk-suites: # both SDKs against the server that sdks/conformance/run.py has started
	cd sdks/python && $(CURDIR)/$(BIN)/python -m pytest -q
	cd sdks/typescript && npm test

$(NODE_READY): sdks/typescript/package-lock.json
	@command -v npm >/dev/null || { echo "the TypeScript SDK's tests need Node 20+ and npm on the PATH"; exit 1; }
	cd sdks/typescript && npm ci --silent --no-audit --no-fund
	touch $@

$(VOCABULARIES): tests/vocabularies/package-lock.json
	cd tests/vocabularies && npm ci --silent --no-audit --no-fund --ignore-scripts
	touch $@

proto: $(READY) $(NODE_READY) ## make all gRPC stubs from proto/
	$(BIN)/python sdks/python/generate.py
	$(BIN)/python sdks/python/generate.py --out src/holdfast/serving/grpc/gen
	cd sdks/typescript && PROTOC_PYTHON=$(CURDIR)/$(BIN)/python npm run --silent generate

# Measuring slows the tests by a fifth, so `make test` does it only where CI asks for it anyway.
.coverage: $(READY) $(VOCABULARIES) $(shell find src tests -name '*.py')
	$(PYTEST) -m "not slow" $(COVERED)

check: $(READY) $(NODE_READY) .coverage ## lint, types, import rules, fresh stubs, branch coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd sdks/python && $(CURDIR)/$(BIN)/ruff check . && $(CURDIR)/$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd sdks/python && $(CURDIR)/$(BIN)/mypy
	cd sdks/typescript && npm run --silent check
	$(BIN)/lint-imports
	$(BIN)/python sdks/python/generate.py --check
	$(BIN)/python sdks/python/generate.py --check --out src/holdfast/serving/grpc/gen
	cd sdks/typescript && PROTOC_PYTHON=$(CURDIR)/$(BIN)/python npm run --silent generate && git diff --exit-code src/gen
	$(BIN)/coverage report

test-integration: $(READY) $(VOCABULARIES) ## everything, thoroughly, with a JUnit report
	mkdir -p build/reports
	HYPOTHESIS_PROFILE=thorough $(PYTEST) --junit-xml=build/reports/integration.xml

test-gpu: ## on a machine with a CUDA device, with its own python3: needs torch, triton, transformers, safetensors, numpy
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu

bench-gpu: ## on such a machine: the CUDA engine beside transformers; needs triton too
	PYTHONPATH=src $(PYTHON) -m holdfast.bench.device --json $${OUT:-.}/device.json

test-mlx: $(READY) ## the MLX engine: its contract, and beside torch; on a Mac it uses the GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_mlx.py tests/test_engine_contract.py

test-vllm: $(READY) ## the upstream contract against a real vLLM: VLLM_URL=http://... (without it: how to start one)
	$(BIN)/python -m tests.vllm $(if $(VLLM_URL),run $(VLLM_URL))

test-sglang: $(READY) ## the upstream contract against a real SGLang: SGLANG_URL=http://... (without it: how to start one)
	$(BIN)/python -m tests.sglang $(if $(SGLANG_URL),run $(SGLANG_URL))

format: $(READY) ## let ruff fix and format
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	cd sdks/python && $(CURDIR)/$(BIN)/ruff check --fix . && $(CURDIR)/$(BIN)/ruff format .

clean: ## remove what was built (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
