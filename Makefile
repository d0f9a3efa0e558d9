# make demo   an environment, the package with what a chat and pictures need, and a run of the embedded model
# make test   an environment, the package with the test tools, and the tests (not the further cases: ARGS="-m further")
# make docs   the site, into docs/_build/html, in the environment of the tests
# make lint   ruff
# make lock   requirements/test.txt anew, at the newest versions: what `make test` installs on Python 3.11 (needs uv)
#
# Variables: PYTHON (interpreter of the environment), VENV (its folder), WORKERS (test processes), ARGS (for pytest),
# EXTRAS (what `make test` installs, unlocked), TORCH_ARGS (for pip, such as an --index-url that has CPU builds of PyTorch).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PY := $(VENV)/bin/python
# A pyenv shim can be on PATH and still not run, so each candidate is tried.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null)
PIP := $(PY) -m pip --disable-pip-version-check
# Nothing is compiled to bytecode before it is imported, as uv has it: most of what is installed never is.
PIP_INSTALL := $(PIP) install --no-compile
INSTALL := $(if $(UV),VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install,$(PIP_INSTALL))
WORKERS ?= auto
TORCH_ARGS ?=
ARGS ?=

.PHONY: help demo test docs lint format lock clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.runtime
	@echo "running the demo: one to two minutes the first time, while XLA compiles; less the next time"
	$(PY) scripts/demo.py

# Neighbouring tests stay in one process (they share compiled functions) until another process runs out of work.
# Every process of the suite imports the same sources: compiled ones are kept, whatever the shell says of bytecode.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test
	$(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m "not gpu and not further" $(ARGS)

# All pages are read anew each time: Sphinx warns of a page only when it reads it, and a page that is gone must go.
docs: $(VENV)/.test
	@echo "building the site: half a minute"
	@rm -rf docs/_build/html
	$(PY) -m sphinx -q -W --keep-going -E -c docs -d docs/_build/doctrees . docs/_build/html
	@echo "built docs/_build/html/index.html"

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# pip is in the environment even where uv made it: the PyTorch step needs it. An older one than 25, as Python 3.11 brings,
# takes three times the time to choose among what an index offers.
$(PY):
	@$(if $(UV)$(PYTHON),true,echo "m3jax needs Python 3.11 or newer: none was found as python3.11 or python3." \
		"Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1)
	@$(if $(PYTHON),$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
		"m3jax needs Python 3.11 or newer, and PYTHON=$(PYTHON) is %d.%d" % v[:2])',true)
	$(if $(UV),$(UV) venv --quiet --seed --python $(or $(PYTHON),3.11),$(PYTHON) -m venv) $(VENV)
	$(PIP_INSTALL) --quiet "pip>=25"

# The demo chats and reads a picture.
$(VENV)/.runtime: pyproject.toml | $(PY)
	@echo "installing m3jax[chat,media] into $(VENV): a few minutes, once"
	$(INSTALL) --quiet --editable ".[chat,media]"
	touch $@

# On Python 3.11 everything is locked in requirements/test.txt, with hashes; on another Python, and where EXTRAS says what is
# wanted, versions are free, as .ci/run wants them for the newest jax. PyTorch is never locked, since a small CPU build has
# another hash than PyPI's: its version is pinned in pyproject.toml, and it goes in first and by pip, which takes a CPU build
# from a local index where one is configured. It comes on 3.11 only; elsewhere the tests that need it are skipped and say so.
$(VENV)/.test: pyproject.toml requirements/test.txt | $(PY)
	@extras="$(EXTRAS)"; locked=; \
	if [ -z "$$extras" ]; then \
		if $(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then locked=1; else extras=test; fi; \
	fi; \
	if [[ -n "$$locked" || ",$$extras," == *,oracle,* ]]; then \
		torch=$$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml); \
		echo "installing $$torch"; \
		$(PIP_INSTALL) --quiet $(TORCH_ARGS) "$$torch"; \
	fi; \
	if [ -n "$$locked" ]; then \
		echo "installing requirements/test.txt"; \
		$(INSTALL) --quiet --no-deps --require-hashes --requirement requirements/test.txt; \
		$(INSTALL) --quiet --no-deps --no-build-isolation --editable .; \
	else \
		echo "installing m3jax[$$extras]"; \
		$(INSTALL) --quiet --editable ".[$$extras]"; \
	fi
	touch $(VENV)/.runtime $@

# After a change of pyproject.toml: `make lock UPGRADE=` keeps the versions that still fit.
UPGRADE ?= --upgrade
lock:
	@$(if $(UV),true,echo "make lock needs uv: pip install uv" >&2; exit 1)
	$(UV) pip compile pyproject.toml --extra test --extra oracle --group build --excludes <(echo torch) \
		--python-version 3.11 --universal --generate-hashes --no-annotate --custom-compile-command "make lock" \
		$(UPGRADE) --quiet --output-file requirements/test.txt

clean:
	rm -rf .venv .venv312 build dist .pytest_cache .hypothesis .ruff_cache docs/_build docs/api docs/traps
	find m3jax pallas_kernels tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
