# `make demo` and `make test` do all the set-up; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all check check-oldest torture tools lint bench docs fixtures dist clean

$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,test,bench]'
	touch $@

# Another stamp, since the demo goes without it. DeepSpeed builds its package with the torch that is there, and compiles
# nothing on a machine without a GPU.
$(VENV)/.engines: $(VENV)/.done
	PYTHONWARNINGS=ignore DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable '.[engines]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps torchtitan torch_checkpointing megatron-core
	touch $@

# torchao has a venv of its own, with the packages of the other one: wherever it is installed transformers imports it, which takes
# time and prints warnings.
TORCHAO := $(VENV)-torchao
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(TORCHAO)/.done: $(VENV)/.done
	test -x $(TORCHAO)/bin/python || $(PYTHON) -m venv $(TORCHAO)
	$(BIN)/python $(SITE) > "$$($(TORCHAO)/bin/python $(SITE))/beside.pth"
	$(TORCHAO)/bin/pip install --quiet --constraint constraints.txt --no-deps torchao
	touch $@

demo: $(VENV)/.done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python fixtures/demo.py

# No stamp, since a folder may be carried to a machine without these programs; looking for them takes no time. They are
# installed with apt-get only where CI=true or TOOLS=1; elsewhere the tests that need them are skipped.
tools: $(VENV)/.done
	sh tests/tools.sh "$(CURDIR)/$(BIN)"

test: $(VENV)/.engines $(TORCHAO)/.done tools lint
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2 --durations=20

# Every row of the tables of which `make test` runs a sample (tests/sampling.py); it takes longer than `make test`.
test-all: export EVERY := 1
test-all: test

UNIT := -m "not live and not slow" tests/index tests/formats tests/engine tests/huggingface tests/resume \
	tests/storage/test_partial.py tests/converters/test_fsdp1.py

# Lint, types, and the tests that need no engine, server or other program: at most 90 s on two cores.
check: $(VENV)/.done lint
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2 $(UNIT)

# Mutated checkpoints with torch as the oracle, failing system calls, kills: MINUTES=1 is a look, 30 the real thing.
torture: $(VENV)/.engines
	DS_ACCELERATOR=cpu $(BIN)/python -m tests.torture --minutes $(or $(MINUTES),30) $(if $(FIRST),--first $(FIRST)) $(if $(WORKERS),--workers $(WORKERS))

# The unit tests with the oldest versions that pyproject.toml promises, on the Python it promises (PYTHON=python3.11).
OLDEST := $(VENV)-oldest
$(OLDEST)/.done: pyproject.toml $(VENV)/.done
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python $(OLDEST)/bin/python --extra torch --extra audit \
		--extra s3 --output-file $(OLDEST)/lowest.txt pyproject.toml
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --requirement $(OLDEST)/lowest.txt --editable . \
		$$(grep -E "^(pytest|pytest-xdist|hypothesis|moto|peft)==" constraints.txt) "moto[s3,server]" selenium
	touch $@

check-oldest: $(OLDEST)/.done
	PATH="$(CURDIR)/$(OLDEST)/bin:$$PATH" python -m pytest -q -n 2 $(UNIT) tests/live/test_reader.py

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.engines
	$(BIN)/python bench/run.py --size $(or $(SIZE),3G)
	$(BIN)/python bench/archive.py --size $(or $(SIZE),3G)

docs: $(VENV)/.done
	$(BIN)/python docs/_build.py

fixtures: $(VENV)/.engines
	$(BIN)/python fixtures/make.py

# The sdist and the wheel, made from the sdist. TAG=v1.0.0 must name the version of the code.
dist: $(VENV)/.done
	test -z "$(TAG)" || test "$(TAG)" = "v$$($(BIN)/python -c 'from ckpttool import __version__; print(__version__)')"
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist

clean:
	rm -rf demo bench-data build dist *.egg-info
