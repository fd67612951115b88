# make demo        install, download SmolLM2-135M, generate with and without EAGLE-3
# make fetch       install and download only
# make test        install and run the tests: ten minutes on two cores
# make test-fast   quick tests only: no compilation, no network: one minute
# make test-all    also expensive tests: all instruction sets, Triton compilation for other GPUs, killed processes
# make lint        install and run the linter
# Needs Python >= 3.10 with venv, make, and for full speed a C++ compiler. Installs into .venv only.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in a few sentences why the sky is blue.
ARGS ?=
# The prompt as one shell word.
QUOTED = '$(subst ','\'',$(value PROMPT))'
RUN = $(VENV)/bin/python

.PHONY: demo fetch test test-fast test-all lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	@$(MAKE) --no-print-directory fetch
	$(RUN) generate.py --checkpoint checkpoints/smollm2-135m --speculate auto --prompt $(QUOTED) --compare $(ARGS)

fetch: $(VENV)/ready
	$(RUN) -m demo.fetch

test: $(VENV)/ready-dev
	$(RUN) -m pytest -n 2 -m "not expensive" tests

test-all: $(VENV)/ready-dev
	$(RUN) -m pytest -n 2 tests

test-fast: $(VENV)/ready-dev
	$(RUN) -m pytest -n 2 -m "not (expensive or slow or compile or kernels or network)" tests

lint: $(VENV)/ready-dev
	$(RUN) -m ruff check .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python >= 3.10 is needed; name one with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: python3 -m venv failed; on Debian/Ubuntu install python3-venv" >&2; exit 1; }

$(VENV)/ready: requirements.txt | $(VENV)/bin/python
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/ready-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@ $(VENV)/ready

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
