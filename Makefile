# The commands of this project. Each makes .venv first if it is missing or out of date.
#
#   make setup      create .venv and install what serving, testing and checking need
#   make serve      start the server                                (ARGS="--port 30001")
#   make test       unit, process and end-to-end tests on the CPU   (ARGS="-k radix")
#   make test-gpu   the tests that need a CUDA device
#   make check      lint, format, types, import contracts, spelling, repository rules
#   make compile    build memsvc.core and the CPU kernels; the others do it when their files have changed
#   make bench      micro-benchmarks of the memory service, one JSON line each
#   make docs       write docs/protocol.md and docs/files.md anew from the docstrings

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
CORE := $(VENV)/.core-compiled
KERNELS := $(VENV)/.kernels-compiled
COMPILED := $(CORE) $(KERNELS)
ARGS ?=
# Run a second time, with the allocator as plain Python, unless ARGS says what to run. The random machines once suffice.
INTERPRETED_TESTS := tests/unit/memsvc tests/unit/target_worker/test_scheduler.py \
	--ignore=tests/unit/memsvc/test_manager_stateful.py --ignore=tests/unit/memsvc/test_liveness.py

.DEFAULT_GOAL := help
.PHONY: help setup compile serve test test-gpu check bench docs

help:
	@sed -n 's/^#   //p' Makefile

setup: $(COMPILED)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; Python 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
			"name another one with: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu it is in the package python3-venv" >&2; \
		rm -rf $(VENV); exit 1; }
	MEMSVC_INTERPRETED=1 $(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,lint,compile,train]'
	@touch $@

compile: $(COMPILED)

# From scratch each time: what an earlier build left must never pass for a build of these files.
$(CORE): setup.py $(wildcard memsvc/core/*.py) | $(STAMP)
	@rm -rf build memsvc/core/*.so memsvc/core__mypyc*.so
	@echo "compiling memsvc.core (about a minute)"
	@MEMSVC_COMPILE=core $(BIN)/python -W ignore setup.py --quiet build_ext --inplace
	@touch $@

# After the core, which removes the build folder.
$(KERNELS): setup.py $(wildcard memsvc/device/cpu/*.cpp memsvc/device/cpu/*.h) | $(STAMP) $(CORE)
	@rm -rf build/temp* memsvc/device/cpu/*.so
	@echo "compiling the CPU kernels (seconds)"
	@MEMSVC_COMPILE=kernels $(BIN)/python -W ignore setup.py --quiet build_ext --inplace
	@touch $@

serve: $(COMPILED)
	@exec $(BIN)/python -m launch $(ARGS)

# Unit tests share the cores. The others start processes of their own and have them to themselves.
test: $(COMPILED)
	$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(BIN)/python -m pytest -n logical --maxprocesses 4 tests/unit)
	$(if $(ARGS),,$(BIN)/python -m pytest tests/proc tests/e2e)
	$(if $(ARGS),,MEMSVC_INTERPRETED=1 HYPOTHESIS_PROFILE=dev $(BIN)/python -m pytest -q $(INTERPRETED_TESTS))

# Kernels are compiled, and interpreted nowhere.
test-gpu: $(COMPILED)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: there is no CUDA device here")'
	$(BIN)/python -m pytest -m gpu tests $(ARGS)

check: $(COMPILED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m docs.generate_protocol --check
	$(BIN)/python -m docs.generate_files --check
	$(BIN)/python -m pytest -q tests/unit/test_repository.py

bench: $(COMPILED)
	$(BIN)/python -m tests.bench.rpc
	$(BIN)/python -m tests.bench.radix

docs: $(STAMP)
	$(BIN)/python -m docs.generate_protocol
	$(BIN)/python -m docs.generate_files
