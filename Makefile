# The first two a newcomer needs: `make train` and `make test`. `make help` lists the rest.
#
# PYTHON=/path/to/python uses an environment of yours as it is, and skips the set-up.
# IN_TIME="-p tests.in_time --until EPOCH_SECONDS --order TEXT" ends the long targets in time, as .ci/run does.
# EMBERSHARD_VERSIONS=torchrec-1.9 takes another set of versions, in a folder of its own (docs/installation.md).

SHELL := /bin/bash
.DEFAULT_GOAL := help

EMBERSHARD_VERSIONS ?=
VENV ?= $(or $(EMBERSHARD_VENV),.venv$(addprefix -,$(EMBERSHARD_VERSIONS)))
ifdef PYTHON
  SETUP :=
  SETUP_TESTS :=
else
  override PYTHON := $(VENV)/bin/python
  SETUP := setup
  SETUP_TESTS := setup-tests
endif

CONFIG ?= examples/quickstart.toml
NPROC ?=
ARGS ?=
IN_TIME ?=
SINCE ?=
#: What `make test` runs: no further cases of what another test guards, and of extras a smoke test each.
PROMISES := not matrix and (not extra or smoke)
CODE := embershard tests scripts benchmarks examples docs/conf.py
DOCS_PACKAGES := build/docs-packages
TORCHREC_1.9 := build/torchrec-1.9.2
TORCHREC_TESTS := tests/unit/sharding tests/unit/pipeline tests/unit/planning tests/ranks/test_exactness.py

.PHONY: help setup setup-tests train test test-all test-rest test-fast test-torchrec-1.9 check rooms format docs browser bench doctor clean clean-venv

help: ## this list
	@grep -hE '^[a-z0-9.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9.-]+):.*## /\1\t/' | expand -t 19

setup: ## make .venv with what training needs, or repair it; a second run is immediate
	@EMBERSHARD_VENV="$(VENV)" $(or $(EMBERSHARD_PYTHON),python3) scripts/setup_env.py

setup-tests: ## the same, and what tests and checks need
	@EMBERSHARD_VENV="$(VENV)" $(or $(EMBERSHARD_PYTHON),python3) scripts/setup_env.py --tests

train: $(SETUP) ## train a small DLRM; a rank per GPU, or 2 on the CPU (CONFIG=..., NPROC=..., ARGS="--set key=value")
	@$(PYTHON) -m embershard train --config $(CONFIG) $(if $(NPROC),--nproc $(NPROC)) $(ARGS)

test: $(SETUP_TESTS) ## every promise once: 8 minutes on 2 cores (ARGS="-k cache" for a part)
	@$(PYTHON) -m pytest -q -n 2 -m "$(PROMISES)" $(ARGS)
	@$(if $(ARGS),,$(PYTHON) -m tests.gpu)

test-all: $(SETUP_TESTS) ## all tests: whole matrices, and all of the extras
	@$(PYTHON) -m pytest -q -n 2 $(ARGS)
	@$(if $(ARGS),,$(PYTHON) -m tests.gpu)

test-rest: $(SETUP_TESTS) ## what test-all has, and test leaves out
	@$(PYTHON) -m pytest -q -n 2 -m "not ($(PROMISES))" $(IN_TIME) $(ARGS)

test-fast: $(SETUP_TESTS) ## unit tests without the slow ones: a minute on 2 cores (ARGS="-k cache" for a part)
	@$(PYTHON) -m pytest -q -n 2 tests/unit -m "not slow and not matrix and not extra" $(ARGS)

$(TORCHREC_1.9): | $(SETUP_TESTS)
	@$(PYTHON) -m pip install -q --no-deps --target $@ torchrec==$(@:build/torchrec-%=%)

test-torchrec-1.9: $(SETUP_TESTS) $(TORCHREC_1.9) ## what TorchRec's changes reach, with 1.9 in front of the venv's (a few minutes)
	@EMBERSHARD_VERSIONS=torchrec-1.9-on-torch-2.13 PYTHONPATH="$(CURDIR)/$(TORCHREC_1.9)$(addprefix :,$(PYTHONPATH))" \
		$(PYTHON) -m pytest -q -n 2 $(IN_TIME) $(or $(ARGS),$(TORCHREC_TESTS))

check: $(SETUP_TESTS) ## lint, format, types and the import contract
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as main; main()"

rooms: ## every file of the package with its subject; lines of each room (SINCE=HEAD~1: and what a change added)
	@$(or $(EMBERSHARD_PYTHON),python3) scripts/rooms.py $(SINCE)

format: $(SETUP_TESTS) ## format the code, and fix what ruff can fix
	$(PYTHON) -m ruff check --fix-only $(CODE)
	$(PYTHON) -m ruff format $(CODE)

$(DOCS_PACKAGES): requirements-docs.txt | $(SETUP)
	@$(PYTHON) -m pip install -q --no-deps --upgrade --target $@ -r $<
	@touch $@

docs: $(DOCS_PACKAGES) ## all pages, and the API's from docstrings, as a site with search: build/docs/index.html
	@PYTHONPATH="$(CURDIR)/$(DOCS_PACKAGES):$(CURDIR)$(addprefix :,$(PYTHONPATH))" \
		$(PYTHON) -m sphinx -q -W --keep-going -c docs . build/docs $(ARGS)

browser: ## Chromium, by apt-get, for the tests of report pages: without it they are skipped, and named at the end
	@scripts/get_browser.sh

bench: $(SETUP) ## all benchmarks; each prints JSON
	@set -e; for name in step_overhead table_scale row_copies "fill_optimality steady" stack_distances plan_scale command_start start_up bad_cells "plan_accuracy hit-rates" plan_comparison; do echo "== $$name"; $(PYTHON) -m benchmarks.$$name; done

doctor: $(SETUP) ## versions, devices and limits, each with its remedy
	@$(PYTHON) -m embershard doctor $(ARGS)

clean: ## remove caches and build folders; runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find embershard tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove .venv
	rm -rf $(VENV)
