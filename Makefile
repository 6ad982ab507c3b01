# Everything a contributor does, from a clean clone. `make` alone lists it.
#
# PYTHON=python3.12 make setup    another interpreter, 3.10 or later
# make test ARGS='-k audit -x'    more arguments for what runs below
# make test JOBS=8                processes that test side by side (2; with ARGS that is no folder,
#                                 this one alone)

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= $(if $(ARGS),$(if $(wildcard $(addsuffix /.,$(ARGS))),2,0),2)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
DEALT_OUT := $(BIN)/python -m pytest -n $(JOBS) --dist load --maxschedchunk 1
STAMP := $(VENV)/stamp
NATIVE := core/portus/engine/copying/_native.so

# Images of Python set it: each process would then compile all tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup site setup-lab lab setup-browser setup-s3 s3 demo test test-hardware test-s3 smoke long suites mutants coverage \
  check fix bench release clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

# What `make test` needs: all but the tools of the documents.
TESTED := $(STAMP)/portus $(STAMP)/deepspeed $(STAMP)/torchtitan $(NATIVE)

setup: $(TESTED) $(STAMP)/docs ## make .venv with everything pinned; a second time does nothing

# A stamp per step: a change of the pins does not install torch again.
$(STAMP)/venv:
	@echo "setup: $(VENV) from $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "setup: Python 3.10 or later is needed; say PYTHON=... make setup"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMP) && touch $@

# Before all else and alone: a range would let pip take the newest build, with gigabytes of CUDA.
$(STAMP)/torch: $(STAMP)/venv
	@echo "setup: $(TORCH)"
	@$(PIP) install '$(TORCH)'
	@touch $@

$(STAMP)/pins: $(STAMP)/torch requirements/dev.txt
	@echo "setup: requirements/dev.txt"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

# What a user installs, and no more, unless all is there already.
$(STAMP)/user: $(STAMP)/torch pyproject.toml core/portus_in_torch.py
	@test -e $(STAMP)/portus || { echo "setup: portus, as a user installs it"; \
	  $(PIP) install --editable '.[lightning,cli]' torchdata -c requirements/dev.txt; }
	@touch $@

# Not isolated: hatchling is among the pins, so this step downloads nothing.
$(STAMP)/portus: $(STAMP)/pins pyproject.toml core/portus_in_torch.py
	@echo "setup: portus, from this tree"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "setup: ready; $(BIN)/portus --help"

$(STAMP)/docs: $(STAMP)/pins requirements/docs.txt
	@echo "setup: requirements/docs.txt"
	@$(PIP) install -r requirements/docs.txt -c requirements/dev.txt
	@touch $@

# Each in a folder of its own, for others import them wherever they find them.
$(STAMP)/deepspeed $(STAMP)/torchtitan: $(STAMP)/%: $(STAMP)/pins requirements/%.txt
	@echo "setup: requirements/$*.txt"
	@rm -rf $(VENV)/$*
	@DS_BUILD_OPS=0 $(PIP) install --no-deps --target $(VENV)/$* -r requirements/$*.txt
	@touch $@

# Not with `make setup`: nothing that a submission must pass needs it.
$(STAMP)/measure: $(STAMP)/pins requirements/measure.txt
	@echo "setup: requirements/measure.txt"
	@$(PIP) install -r requirements/measure.txt -c requirements/dev.txt
	@touch $@

# Only with `make release`.
$(STAMP)/release: $(STAMP)/pins requirements/release.txt
	@echo "setup: requirements/release.txt"
	@$(PIP) install -r requirements/release.txt -c requirements/dev.txt
	@touch $@

# In the tree, and not in .venv: a stamp says nothing of it. Without a C compiler there is none.
$(NATIVE): core/portus/engine/copying/native.c core/build_native.py | $(STAMP)/portus
	@echo "setup: the helper in C"
	@$(BIN)/python core/build_native.py || true

setup-lab: setup ## what the lab needs: packages (as root, by apt), and a kernel in a cache
	@$(BIN)/python -m tests.lab --setup

lab: setup ## a shell in a machine with Soft-RoCE and persistent memory, emulated
	@$(BIN)/python -m tests.lab

test-hardware: setup ## the tests marked rdma and pmem, and those that boot guests, in the lab
	@$(DEALT_OUT) -v --durations=8 -m lab tests/lab $(ARGS)

setup-browser: ## a headless Chromium, which the tests of pages look with (as root, by apt)
	@[ "$$PORTUS_BROWSER" = optional ] || command -v chromium-headless-shell > /dev/null || \
	  command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
	  apt-get -o Acquire::Retries=3 update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get -o Acquire::Retries=3 install -y -qq --no-install-recommends chromium-headless-shell; }

setup-s3: setup ## what a real S3 server needs: packages of Ceph (as root, by apt)
	@$(BIN)/python -m tests.s3 --setup

s3: setup ## a real S3 server on loopback until Ctrl-C, and what to export to use it
	@$(BIN)/python -m tests.s3

test-s3: setup ## the tests marked s3, against such a server; about a minute
	@$(BIN)/python -m pytest -v --durations=8 -m s3 tests/s3 $(ARGS)

demo: $(STAMP)/user ## train, kill in the middle of a save, resume, compare; about 3 minutes. ARGS=--dlrm: embedding tables
	@test -e $(NATIVE) || $(BIN)/python core/build_native.py || true
	@$(BIN)/python recipes/$(if $(filter --dlrm,$(ARGS)),dlrm_tiny,gpt_tiny_lightning).py --demo $(filter-out --dlrm,$(ARGS))

test: $(TESTED) ## the inner loop: all tests but the long ones; under 4 minutes
	@$(PYTEST) $(ARGS)

long: setup ## what takes long: deeper searches, and trainings that are killed
	@$(DEALT_OUT) --durations=8 -m long $(ARGS)

smoke: setup ## the oldest and the newest Python, torch, Lightning...; a first time fetches 6 GB
	@$(BIN)/python -m tests.smoke $(ARGS)

suites: setup ## Accelerate's own tests of checkpoints, stock and with Portus (from PyPI, about 3 minutes)
	@$(BIN)/python -m tests.suites

mutants: setup $(STAMP)/measure ## what the tests do not notice, by a sample of small changes; minutes for each package. ARGS=reach/index
	@$(BIN)/python -m tests.mutants $(ARGS)

coverage: setup $(STAMP)/measure ## how much of the core the tests run, in all processes. ARGS=tests/unit: some of them
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -n $(JOBS) --dist worksteal $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report --skip-covered --sort=cover

check: site ## style, format, types, floors, the site
	@echo "check: ruff";         $(BIN)/ruff check --quiet
	@echo "check: ruff format";  $(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --check; exit 1; }
	@echo "check: mypy";         $(BIN)/mypy
	@echo "check: lint-imports"; $(BIN)/lint-imports --no-cache --no-logo

site: $(STAMP)/portus $(STAMP)/docs ## the documents as static pages in build/site, without a warning
	@echo "site: mkdocs";        NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fix: $(STAMP)/portus ## let ruff put style and format right
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: setup ## every row of docs/benchmarks.md, in one run
	@$(BIN)/python -m tests.bench.run $(ARGS)

release: $(STAMP)/portus $(STAMP)/release ## what is released, in dist/: source archive and wheels, each installed and tried; under a minute
	@$(BIN)/python -m tests.release

clean: ## remove what was made here, .venv included
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find core portus_* recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -f core/portus/engine/copying/*.so
