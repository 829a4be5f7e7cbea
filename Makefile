# make serve      set up and serve the default model on http://127.0.0.1:8080
# make test       set up and run the tests, WORKERS at a time
# make test-slow  the tests that compile kernels anew, install packages or run long
# make test-quality  what methods do to the default model's answers, beside their nulls
# make test-python PYTHON=python3.13   the tests that need no torch, on another Python
# make triton-test  the kernels for GPUs, interpreted on the CPU
# make gateway-test   build midfill-gateway and test it in an environment of its own
# make lint       ruff, mypy, the direction of imports; with Node.js, the built pages, too
# make web        build the browser pages anew from web/; needs Node.js
# make web-check  whether the built pages are what web/ builds
# make docs       build the documentation site into build/docs; open index.html there
# make fuzz       a million inputs for the parsers; TARGETS="gguf planner" RUNS=0.1 for fewer
# make fuzz-api   CALLS=100000 calls of the API, ANSWERS=2000 hostile servers behind a gateway
# make bench      the EFIM rounds load on this machine

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
ARGS ?=
TARGETS ?=
RUNS ?= 1
CALLS ?= 100000
# With their versions, from pyproject.toml.
KERNEL_LIBRARIES = $(foreach name,numba numpy msgspec filelock platformdirs, \
	$(shell sed -n "s/^ *\"\($(name)[>=].*\)\",.*/'\1'/p" pyproject.toml))
ANSWERS ?= 2000

.PHONY: serve test test-slow test-quality test-python triton-test gateway-test lint web web-check docs bench fuzz \
	fuzz-api format clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	$(BIN)/midfill serve $(ARGS)

# The processes that tests start, several hundred, share the compiled modules of the first.
test test-slow test-quality: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-dev
	$(BIN)/midfill pull
	$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/midfill pull
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "slow and not quality" $(ARGS)

test-quality: $(VENV)/.installed-dev
	$(BIN)/midfill pull
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m quality $(ARGS)

triton-test: $(VENV)/.installed-dev
	WORKERS=$(WORKERS) .ci/triton-test $(ARGS)

gateway-test:
	PYTHON=$(PYTHON) .ci/gateway-test $(ARGS)

test-python:
	.ci/test-python $(PYTHON) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src lab benchmarks tests examples docs
	$(BIN)/ruff format --check src lab benchmarks tests examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports
ifneq ($(shell command -v npm),)
	$(MAKE) web-check
else
	@echo "skipped: no npm, so the built pages are not compared with their sources in web/"
endif

web: web/node_modules/.installed
	cd web && npm run --silent build

web-check: web/node_modules/.installed
	cd web && npm run --silent check

web/node_modules/.installed: web/package-lock.json
	cd web && npm ci
	touch $@

# The theme warns of MkDocs 2 at every build; pyproject.toml excludes it.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed-dev
	$(BIN)/midfill bench rounds $(ARGS)

fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python tests/fuzz/run.py --runs $(RUNS) $(TARGETS)

fuzz-api: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz/api.py --calls $(CALLS) --answers $(ANSWERS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src lab benchmarks tests examples docs
	$(BIN)/ruff format src lab benchmarks tests examples docs

# An older pip takes longer, and downloads a model to say where it is (models/checkpoints).
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install 'pip>=23.3'

# The kernels are compiled beside the rest of the installation: either leaves a core idle at times.
# What goes wrong there is said by the server, which compiles what it lacks.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(KERNEL_LIBRARIES)
	PYTHONPATH=src $(BIN)/python -P -m midfill.runners.cpu.compile_ahead >/dev/null 2>&1 & \
	$(BIN)/python -m pip install -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml lab/pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]' -e lab
	touch $@ $(VENV)/.installed

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -e '.[fuzz]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[docs]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build src/*.egg-info lab/src/*.egg-info
