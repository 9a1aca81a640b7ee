# Every target sets up what it needs: a virtual environment, PyTorch, this package and its test tools.
# A bare machine needs Python 3.11 or later and a network (or folders of wheels that pip is told of).
#
#   TORCH   what pip installs for PyTorch, before the package: pinned here; on a GPU machine choose your own build
#   VENV    where the environment is put

TORCH ?= torch==2.13.0
VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/meshwright-is-installed
RUN := $(VENV)/bin/python

# Many processes share the cores: one thread each is fastest.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: venv test slow demo lint

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

test: venv
	$(RUN) -m pytest -n 2 --dist loadfile -m "not slow"

slow: venv
	$(RUN) -m pytest -n 2 --dist loadfile -m slow

demo: venv
	$(RUN) examples/demo.py

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)
