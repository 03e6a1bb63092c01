# make demo · make test · make lint : each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint format docs clean

demo: .venv/core
	$(BIN)/tessera demo

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-slow: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/core
	$(BIN)/python docs/generate.py

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable '.[dev,track,data,text,eval,mesh,video]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
