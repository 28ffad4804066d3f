# Everything runs in .venv, which `make setup` fills from constraints.txt (exact versions, hashes).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DATA ?= .readymark
PROTOS := $(shell find protos/readymark -name '*.proto')

.PHONY: help setup protos model run up test quick lint check bench clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.stamp protos ## Make the virtual environment and the contracts.

# --no-deps with hashes: what is installed is exactly what constraints.txt lists, nothing is resolved here.
$(VENV)/.stamp: constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed: set PYTHON=/path/to/python3.11" >&2; exit 1; }
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
