# Two targets set everything up from a bare Python 3.11 or newer:
#   make quickstart   install, then run the main job
#   make test         install, check, and run every test
# Another interpreter: make test PYTHON=python3.12
# The comparisons with PyTorch too: make test EXTRAS=jax,torch,dev

PYTHON ?= python3
EXTRAS ?= jax,dev
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready-$(EXTRAS)

.DEFAULT_GOAL := help
.PHONY: help quickstart test check format bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS='	' read -r target does; do \
		printf '  make %-12s %s\n' "$$target" "$$does"; done
	@sed -n '4,5p' Makefile | cut -c3-

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "drumline needs Python 3.11 or newer and '$(PYTHON)' is not: make test PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(READY)

quickstart: $(READY) ## install, then train through a preemption
	$(BIN)/drumline create examples/quickstart.yaml --follow

test: check ## install, check, and run every test
	$(BIN)/pytest --numprocesses 3 --dist worksteal

check: $(READY) ## lint, format and types, as each commit should pass them
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## mend what can be mended of lint and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## print how quick the commands and the server are
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/thousand_jobs.py

clean: ## remove the environment and what tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
