# `make test` and `make demo` need nothing but Python 3.11 or later and a network or a wheel folder.
# For a small download on a machine without a GPU: make test TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

TORCH ?= torch==2.13.0
VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/meshwright-is-installed
RUN := $(VENV)/bin/python

.PHONY: venv test demo lint slow

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

test: venv
	$(RUN) -m pytest

slow: venv
	$(RUN) -m pytest -m slow

demo: venv
	$(RUN) examples/demo.py

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)
