# Everything a checkout needs. Each target prepares what it uses; `make` alone lists them.
#
# PYTHON=python3.12 make test     with another interpreter (3.11 or later)
# make train SPEC=my.toml         with another spec file

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON      ?= python3
SPEC        ?= examples/stdlib-code.toml
# Files of tests that run side by side. Half of a test's time is one process that starts, or waits for another: on two
# cores four left a third of them idle.
WORKERS     ?= 5

VENV := .venv
BIN  := $(VENV)/bin/python
# Of an installed environment only these files decide; a later call with the same files starts at once.
KEY  := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test tested test-deep test-cuda bench mutants lint style types compiled format docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.train  ## train the example: a 3 M parameter model on two CPU processes
	$(BIN) -m paceline train $(SPEC)

test: style  ## lint, types and the tests
	@$(MAKE) --no-print-directory -j 2 types tested

# Types are checked beside the tests, which leave a core idle now and then; what is wrong with them is told at once.
tested: compiled
	$(BIN) -m pytest -m "not deep" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-deep: $(VENV)/.test  ## the heavier sweeps too
	$(BIN) -m pytest

test-cuda: $(VENV)/.test  ## the tests that need a GPU, and its benchmarks
	@if $(BIN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN) -m pytest -m cuda && $(BIN) benchmarks/gpu.py $(or $(ARGS),--quick) && \
	    $(BIN) benchmarks/costs/gpu_switches.py $(or $(ARGS),--quick); \
	else \
	  echo "test-cuda: torch sees no CUDA device here, so nothing was run"; \
	fi

bench: $(VENV)/.bench  ## the benchmarks, on this machine (ARGS=--quick for a short look)
	@for script in $$(grep -l '"--quick"' benchmarks/*.py benchmarks/costs/*.py); do echo "== $$script"; $(BIN) $$script $(ARGS); done

mutants: $(VENV)/.mutants  ## small changes of the code that no test notices (ARGS="--rooms verify --sample 20")
	$(BIN) tests/mutations/mutants.py $(ARGS)

lint: style types  ## ruff and mypy

style: $(VENV)/.test
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .

types: $(VENV)/.test
	$(BIN) -m mypy

# Bytecode of all sources, also where PYTHONDONTWRITEBYTECODE is set: hundreds of processes of the tests would compile
# them again. Of tests it is what their plain imports take, and what pytest makes of them when it collects them.
compiled: $(VENV)/.test
	@$(BIN) -m compileall -q src tests benchmarks
	@PYTHONDONTWRITEBYTECODE= $(BIN) -m pytest --collect-only -qq > $(VENV)/collected.txt || { cat $(VENV)/collected.txt; false; }

format: $(VENV)/.test  ## let ruff rewrite what it can
	$(BIN) -m ruff check --fix .
	$(BIN) -m ruff format .

docs: $(VENV)/.docs  ## the documentation as a site in site/
	$(BIN) docs/scripts/write_reference.py
	$(BIN) docs/scripts/write_catalog.py
	NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build --strict

clean:  ## remove what the other targets made, but neither runs/ nor the virtual environment
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments ---------------------------------------------------------------------------------------------------

# A torch that the interpreter already has is used (large, and built for the machine); its own version then stands
# instead of the pinned one. Without one, pip installs the pinned version from wherever it is configured to look.
# (Of an activated virtual environment a new one inherits nothing, so its torch does not count.)
HAS_TORCH := import importlib.metadata as m, sys; \
	version = m.version("torch").split("+")[0].split("."); \
	sys.exit(sys.prefix != sys.base_prefix or (int(version[0]), int(version[1])) < (2, 11))
TOO_OLD := import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or later: PYTHON=... make")

$(VENV)/.made: | $(KEY)
	@$(PYTHON) -c '$(TOO_OLD)'
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then \
	  echo "using the torch of $$($(PYTHON) -c 'import sys; print(sys.prefix)')"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); touch $(VENV)/.system-torch; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	fi
	@touch $@

# Installs $(WHAT). The pin of a torch that is already there is left out.
define install
	@if [ -e $(VENV)/.system-torch ]; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi \
	  > $(VENV)/constraints.txt
	@echo "installing $(WHAT) into $(VENV) (once)"
	$(BIN) -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt -e "$(WHAT)"
	@touch $@
endef

$(VENV)/.train: WHAT := .
$(VENV)/.test:  WHAT := .[all,test,lint]
$(VENV)/.docs:  WHAT := .[docs]
$(VENV)/.bench: WHAT := .[all,bench]
$(VENV)/.mutants: WHAT := .[all,test,mutants]
$(VENV)/.train $(VENV)/.test $(VENV)/.docs $(VENV)/.bench $(VENV)/.mutants: $(KEY) | $(VENV)/.made
	$(install)
