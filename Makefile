# Everything is installed into .venv (and .venv-sglang) in this folder; the embedded model goes into the user's cache
# folder (or into $DDTREE_CACHE). Nothing else is written.
#
#   make serve                        set up what is missing, then serve the embedded model on 127.0.0.1:30000
#   make serve ARGS="--mode linear"   the same with options of `ddtree serve`
#   make test                         lint, types, import arrows and the fast tests (ARGS goes to pytest)
#   make test-full                    the tests alone, the long ones too
#   make test-sglang                  the plug-in inside SGLang, on the CPU, in an environment of its own (.venv-sglang)
#   make test-sglang SGLANG=0.5.23    the same in the other release that it knows (.venv-sglang-0.5.23)
#   make test-sglang-core             its shortest part alone: two servers
#   make lint                         what `make test` does before its tests
#   make setup | make clean           only the set-up | remove .venv and the tools' caches
#
# PYTHON=python3.12 chooses the interpreter; PIP_ARGS="..." goes to every pip install, for example to choose
# another package index, such as one with PyTorch's CPU builds. Tests run in JOBS processes, one for each core but at
# most four, each with one thread; JOBS=1 runs them in pytest's own, for a debugger or a handful of tests.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
HOST ?= 127.0.0.1
PORT ?= 30000

VENV := .venv
SGLANG ?= 0.5.17
SGLANG_OTHER := $(filter-out $(SGLANG),0.5.17 0.5.23)
SGLANG_VENV := .venv-sglang$(if $(filter 0.5.17,$(SGLANG)),,-$(SGLANG))
SGLANG_CORE := tests/sglang_server/test_sglang_core.py
BIN := $(VENV)/bin
# On two cores the two processes of `make test` took up to 4.9 GB together, those of `make test-sglang` and servers 3.2 GB.
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); [ $$n -lt 4 ] && echo $$n || echo 4)
spread = $(if $(filter-out 0 1,$(JOBS)),--numprocesses $(JOBS) --dist $(1))
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

# pip asks rustc for its version, and a rustc that is only rustup's shim then makes ~/.rustup: keep that in here.
ifeq ($(wildcard $(HOME)/.rustup),)
export RUSTUP_HOME ?= $(CURDIR)/$(VENV)/.rustup
endif

.PHONY: serve lint test test-full test-sglang test-sglang-core setup clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.runtime
	$(BIN)/ddtree serve --host $(HOST) --port $(PORT) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(call spread,worksteal) $(ARGS)

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest -m "full or not full" $(call spread,worksteal) $(ARGS)

# SGLang's wheels are for CPython 3.11 to 3.13 on Linux. Only float32 on the CPU runs here: no GPU is needed, nor used.
test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_PATH)
	HF_HUB_OFFLINE=1 $(SGLANG_VENV)/bin/python -m pytest tests/sglang_server $(call spread,loadfile) $(ARGS)

test-sglang-core: $(SGLANG_VENV)/.ready
	$(SGLANG_PATH)
	HF_HUB_OFFLINE=1 $(SGLANG_VENV)/bin/python -m pytest $(SGLANG_CORE) tests/sglang_server/test_sglang_parts.py \
	  tests/sglang_server/test_sglang_releases.py $(call spread,loadfile) $(ARGS)

setup: $(VENV)/.dev

clean:
	rm -rf $(VENV) .venv-sglang .venv-sglang-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
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

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[dev]"
	@touch $(VENV)/.runtime $@

# What .venv has (torch, Triton, pytest, pip and the package itself) is not installed once more: its folder comes last on
# the path of SGLang's environment, behind what SGLang pins. Written at every run: a kept environment serves many checkouts.
SITE = import sysconfig; print(sysconfig.get_path("purelib"))
SGLANG_PATH = @printf '%s\n' "$(CURDIR)/src" "$$($(BIN)/python -c '$(SITE)')" \
  > "$$($(SGLANG_VENV)/bin/python -c '$(SITE)')/ddtree-beside.pth"
SGLANG_PIP = $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check
$(SGLANG_VENV)/.ready: tests/sglang_server/requirements.txt tests/sglang_server/pins-$(SGLANG).txt $(VENV)/.dev
	$(BIN)/python -m venv --without-pip $(SGLANG_VENV)
	$(SGLANG_PATH)
	$(SGLANG_PIP) install $(PIP_ARGS) --requirement tests/sglang_server/requirements.txt \
	  --constraint tests/sglang_server/pins-$(SGLANG).txt
	$(SGLANG_PIP) install $(PIP_ARGS) --no-deps sglang==$(SGLANG)
	for release in $(SGLANG_OTHER); do \
	  $(SGLANG_PIP) download --no-deps --dest $(SGLANG_VENV)/wheels $(PIP_ARGS) sglang==$$release || exit 1; done
	@touch $@
