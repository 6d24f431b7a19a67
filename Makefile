# The commands of this project. Each makes .venv first if it is missing or out of date.
#
#   make setup      create .venv and install what serving, testing and checking need
#   make serve      start the server                                (ARGS="--port 30001")
#   make test       unit, process and end-to-end tests on the CPU   (ARGS="-k radix")
#   make test-gpu   the tests that need a CUDA device
#   make check      lint, format, types, import contracts, spelling, repository rules
#   make bench      micro-benchmarks of the memory service, one JSON line each
#   make docs       write docs/protocol.md and docs/files.md anew from the docstrings

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-gpu check bench docs

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; Python 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
			"name another one with: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu it is in the package python3-venv" >&2; \
		rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/python -m launch $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# pytest ends with 5 if nothing was selected, which is what happens as long as no test is marked gpu.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests $(ARGS) || test $$? -eq 5

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m docs.generate_protocol --check
	$(BIN)/python -m docs.generate_files --check
	$(BIN)/python -m pytest -q tests/unit/test_repository.py

bench: $(STAMP)
	$(BIN)/python -m tests.bench.rpc
	$(BIN)/python -m tests.bench.radix

docs: $(STAMP)
	$(BIN)/python -m docs.generate_protocol
	$(BIN)/python -m docs.generate_files
