# make demo and make test are all a new machine needs: git, make and Python. Both install into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export DS_BUILD_OPS := 0 # DeepSpeed as Python alone: its kernels are compiled where they are used

.PHONY: demo test fuzz check bench format clean

demo: $(VENV)/.installed
	$(BIN)/python examples/transformer_annotated.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --max-worker-restart 0

fuzz: $(VENV)/.installed-test
	INSTRUMENT_FUZZ=all $(BIN)/python -m pytest -m fuzz

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layers.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/modules.py
	$(BIN)/python benchmarks/traces.py
	$(BIN)/python benchmarks/syncs.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[$*]'
	touch $@
