# `make demo` and `make test` do all the set-up; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench fixtures clean

$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,test,bench]'
	touch $@

demo: $(VENV)/.done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python fixtures/demo.py

test: $(VENV)/.done lint
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.done
	$(BIN)/python bench/run.py --size $(or $(SIZE),3G)

fixtures: $(VENV)/.done
	$(BIN)/python fixtures/make.py

clean:
	rm -rf demo bench-data build dist *.egg-info
