# Two targets set everything up from a bare Python 3.11 or newer:
#   make quickstart   install, then run the main job
#   make test         install, then run every test
# Another interpreter: make test PYTHON=python3.12
# With the comparisons with PyTorch: make test EXTRAS=jax,torch,dev
# The oldest and the newest supported JAX: make test JAX=oldest, make test JAX=newest

PYTHON ?= python3
EXTRAS ?= jax,dev

# Each version of JAX has its own environment. Oldest and newest are the ends of pyproject's range.
JAX ?= pinned
ifeq ($(JAX),pinned)
  VENV := .venv
else ifeq ($(JAX),oldest)
  VENV := .venv-oldest
  JAX_VERSION := 0.10.2
else ifeq ($(JAX),newest)
  VENV := .venv-newest
  JAX_VERSION := 0.12.0.1
else
  $(error JAX is '$(JAX)'; it can be oldest, newest or pinned)
endif
JAX_PINS := $(if $(JAX_VERSION),s/^(jax|jaxlib)==.*/\1==$(JAX_VERSION)/)

# Hundreds of short processes import the package. Without bytecode files each compiles it again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/ready-$(EXTRAS)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help quickstart test check format simulate bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS='	' read -r target text; do \
		printf '  make %-12s %s\n' "$$target" "$$text"; done
	@sed -n '4,6p' Makefile | cut -c3-

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "drumline needs Python 3.11 or newer and '$(PYTHON)' is not: make test PYTHON=/path/to/python3.11"; exit 2; }
	@test '$(JAX)' != newest || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "jax $(JAX_VERSION) needs Python 3.12 or newer and '$(PYTHON)' is not: make test JAX=newest PYTHON=/path/to/python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -E '$(JAX_PINS)' constraints.txt > $(VENV)/constraints.txt
	@# pip before 23.3 needs three times as long to choose among the files of an index.
	$(PIP_INSTALL) --upgrade pip || true
	$(PIP_INSTALL) --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	@# pip would compile the bytecode on one core. The tools and the tests of packages need none,
	@# hardly any test imports scipy, and some packages have files for other versions.
	@$(BIN)/python -m compileall -qq --workers 0 \
		-x '/tests/|packages/(pip|setuptools|pkg_resources|pygments|mypy|mypyc|scipy)/' \
		$(VENV)/lib src || true
	@touch $(READY)

quickstart: $(READY) ## install, then train through a preemption
	$(BIN)/drumline create examples/quickstart.yaml --follow

test: $(READY) ## run every test, or those of TESTS="tests/cli tests/hosts"
	$(BIN)/pytest --numprocesses 4 --dist worksteal $(TESTS)

check: $(READY) ## lint, format and types, which every commit must pass
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## fix the format and the lint errors that can be fixed automatically
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

SEEDS ?= 2000
FIRST ?= 1

simulate: $(READY) ## run SEEDS=2000 simulated fault schedules of the job manager, from seed FIRST=1
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

bench: $(READY) ## print the speed of the commands and of the server
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/thousand_jobs.py
	$(BIN)/python benchmarks/many_jobs.py

clean: ## remove the environments and the caches of tools
	rm -rf .venv .venv-oldest .venv-newest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
