# make demo and make test are all a new machine needs: git, make and Python. Both install into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PUBLIC := build/public-scripts/venv
GPU_SIM := .venv-cuda
ON_GPU_SIM = shared=$$(mktemp); trap "rm -f $$shared*" EXIT; export SIMGPU=1 SIMGPU_SHARED=$$shared;
GPU_SIM_PYTEST := $(GPU_SIM)/bin/python -m pytest -m "gpu or gpu_sim" --timeout 300 --tb short
TIMED := tests/replay/test_gpu_replay.py tests/syncs/test_gpu_syncs.py tests/simgpu/test_experiments.py

export DS_BUILD_OPS := 0 # DeepSpeed as Python alone: its kernels are compiled where they are used
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of interpreters: without bytecode, each compiles the library

.PHONY: demo test test-fast gpu-sim gpu-sim-frameworks gpu-sim-environment floors matrix fuzz check bench docs pictures gpu-check
.PHONY: experiments public-scripts traces format clean

demo: $(VENV)/.installed
	$(BIN)/python examples/transformer_annotated.py

# A test that hangs fails after five minutes, and shows where each thread was; the longest takes half a minute.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --max-worker-restart 0 --timeout 300 --tb short

# The tests to run while working: all but frameworks, vendors' tools, corpora and what else a marker names.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --quiet \
		-m "not (framework or vendor or corpus or process or nsys or browser or native or fuzz or gpu)"

# The tests that need a GPU, on one in software (docs/simulated-gpu.md): with a CUDA build of torch, of which pip
# fetches 3 GB where it has no copy, and g++, in an environment of its own.
# Tests that measure times of the CPU run alone, the others in two processes.
gpu-sim: gpu-sim-environment
	$(GPU_SIM)/bin/python -m tests.simgpu.install $(GPU_SIM)
ifdef TESTS
	$(ON_GPU_SIM) $(GPU_SIM_PYTEST) $(TESTS)
else
	$(ON_GPU_SIM) code=0; $(GPU_SIM_PYTEST) $(TIMED) || code=$$?; \
		$(GPU_SIM_PYTEST) --numprocesses 2 --dist loadfile --max-worker-restart 0 $(addprefix --ignore=,$(TIMED)) || code=$$?; \
		exit $$code
endif

# Predictions against programs that are really changed, in ten minutes; gpu-sim runs a sample. As root, it is undisturbed.
experiments: gpu-sim-environment
	$(GPU_SIM)/bin/python -m tests.simgpu.install $(GPU_SIM)
	$(ON_GPU_SIM) $(GPU_SIM)/bin/python -m pytest -m experiment --timeout 600 --tb short tests/simgpu/test_experiments.py

# Frameworks on it, in five minutes and 400 MB more.
gpu-sim-frameworks: gpu-sim-environment
	$(GPU_SIM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/simgpu/constraints.txt \
		--editable '.[frameworks]' torchtitan
	$(MAKE) gpu-sim TESTS=tests/simgpu/test_frameworks.py

gpu-sim-environment: $(GPU_SIM)/.installed

# The fast tests and the demo with the oldest dependencies, then with other versions of Python and torch, each in an
# environment that is removed afterwards: 3 GB to fetch and 6 GB on disk. VERSIONS="3.13:2.9.1" takes some.
floors: $(VENV)/.installed
	$(BIN)/python -m scripts.versions --floors 3.10:2.6.0

matrix: VERSIONS ?= 3.10:2.6.0 3.12:2.14.1 3.13:2.9.1 3.12:2.15.0
matrix: $(VENV)/.installed
	$(BIN)/python -m scripts.versions $(VERSIONS)

fuzz: export INSTRUMENT_FUZZ := all
fuzz: export INSTRUMENT_FUZZ_SECONDS ?= 1800
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m fuzz

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layers.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/black_box.py
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/slow_ranks.py
	$(BIN)/python benchmarks/modules.py
	$(BIN)/python benchmarks/traces.py
	$(BIN)/python benchmarks/stalls.py
	$(BIN)/python benchmarks/windows.py
	$(BIN)/python benchmarks/memory_snapshots.py
	$(BIN)/python benchmarks/syncs.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/memory.py

# The site, in build/docs: pages and the reference from docstrings. A broken link fails it.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs . build/docs

# The screenshots in docs/pictures, as scripts/pictures.py lists them; scripts/install-chromium.sh installs the browser.
pictures: $(VENV)/.installed-test
	$(BIN)/python -m scripts.pictures

# What only a GPU can show, in under ten minutes; results in build/gpu-check.json. CHECKS="graph regions" runs
# some, INSTRUMENT_KEEP_TRACES=FOLDER keeps small traces, REHEARSE=1 runs it without a GPU. Without make:
# python -m scripts.gpu_check.
gpu-check: $(VENV)/.installed-test
	$(BIN)/python -m scripts.gpu_check $(CHECKS) $(if $(REHEARSE),--rehearse)

# The real traces that tests and benchmarks read, from GitHub into build/traces; without them these tests skip.
# TRACE_REPOSITORIES=FOLDER takes them from clones there, INSTRUMENT_TRACES=FOLDER names a folder that holds them.
traces:
	$(PYTHON) -m scripts.traces

# Public training scripts under instrument. PUBLIC_SCRIPTS=FOLDER takes clones from there instead of from GitHub,
# SCRIPTS="mnist vae" runs some; only all of them write the page.
public-scripts: $(PUBLIC)/.installed
	$(PUBLIC)/bin/python -m scripts.public_scripts $(or $(SCRIPTS),--out docs/public-scripts.md)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(GPU_SIM) runs build dist .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable .
	touch $@

# The extra dev has the extras docs and test, so that make check, make docs and make test install once.
$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[dev]'
	touch $(VENV)/.installed $(VENV)/.installed-docs $(VENV)/.installed-test $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[$*]'
	touch $@

$(GPU_SIM)/.installed: pyproject.toml tests/simgpu/constraints.txt tests/simgpu/hta.txt
	test -x $(GPU_SIM)/bin/python || $(PYTHON) -m venv $(GPU_SIM)
	$(GPU_SIM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/simgpu/constraints.txt \
		--editable '.[itt,test-tools,traces]'
	$(GPU_SIM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--constraint tests/simgpu/constraints.txt --requirement tests/simgpu/hta.txt \
		nvidia-cuda-crt nvidia-cuda-profiler-api
	touch $@

$(PUBLIC)/.installed: scripts/public_scripts/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PUBLIC)
	$(PUBLIC)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable . --requirement $<
	$(PUBLIC)/bin/python -m scripts.public_scripts.torchvision_without_cuda
	touch $@
