# Everything is installed into .venv in this folder; the embedded model goes into the user's cache folder (or into
# $DDTREE_CACHE). Nothing else is written.
#
#   make serve                        set up what is missing, then serve the embedded model on 127.0.0.1:30000
#   make serve ARGS="--mode linear"   the same with options of `ddtree serve`
#   make test                         lint, types, import arrows and the fast tests (ARGS goes to pytest)
#   make test-full                    the tests alone, the long ones too
#   make setup | make clean           only the set-up | remove .venv and the tools' caches
#
# PYTHON=python3.12 chooses the interpreter; PIP_ARGS="..." goes to every pip install, for example to choose
# another package index, such as one with PyTorch's CPU builds.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
HOST ?= 127.0.0.1
PORT ?= 30000

VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

# pip asks rustc for its version, and a rustc that is only rustup's shim then makes ~/.rustup: keep that in here.
ifeq ($(wildcard $(HOME)/.rustup),)
export RUSTUP_HOME ?= $(CURDIR)/$(VENV)/.rustup
endif

.PHONY: serve test test-full setup clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.runtime
	$(BIN)/ddtree serve --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(ARGS)

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest -m "full or not full" $(ARGS)

setup: $(VENV)/.dev

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is installed is installed anew only when pyproject.toml or constraints.txt change.
$(VENV)/.python:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "ddtree needs Python 3.11 or later; there is no '$(PYTHON)'. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("ddtree needs Python 3.11 or later; $(PYTHON) is %d.%d. Try: make $(MAKECMDGOALS) PYTHON=python3.12" % v)'
	"$(PYTHON)" -m venv $(VENV) || \
	  { echo "Python could not make a virtual environment. On Debian and Ubuntu the package python3-venv is needed."; exit 1; }
	@touch $@

$(VENV)/.runtime: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) --editable ".[dev]"
	@touch $@
