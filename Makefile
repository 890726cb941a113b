# On a machine with nothing but python3 (and its venv module), every target below creates .venv, installs what it
# needs once, and runs.
#
#   make train                          train a small Llama on 4 CPU processes
#   make test                           lint, format, types, and the fast tests
#   make test-gpu RANKS=4               the GPU tests, on 4 ranks of one GPU
#
# The default torch is whatever pip finds for this pin. To bring another:
#
#   make train TORCH=torch==2.11.0                          another release
#   make train TORCH="torch --index-url URL"                another index (CPU-only builds, a CUDA version)
#   make train TORCH= PYTHON=/opt/conda/bin/python          the torch that this python already has
#   make train TORCH= VENV=path/to/venv                     an environment that already exists, torch included

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0

NPROC      ?= 4
RANKS      ?= 4
TRAIN_ARGS ?=
TEST_ARGS  ?=
BENCH_ARGS ?=
GPU_TEST_ARGS ?=
BENCHMARKS ?= $(filter-out benchmarks/common.py benchmarks/gpu_%.py,$(wildcard benchmarks/*.py))

BIN := $(VENV)/bin
# A stamp per torch: asking for another one installs it, asking again does nothing.
STAMP := $(VENV)/.torch_gtp-$(or $(subst =,-,$(firstword $(TORCH))),existing-torch)
# An environment without its own torch has to see the one of the python that it is made from.
VENV_FLAGS := $(if $(strip $(TORCH)),,--system-site-packages)

# The processes share this machine's cores: one thread each, unless the caller knows better. (torchrun would choose
# the same, with a warning per run.)
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The examples and tests build their models from a configuration: nothing is ever fetched.
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install train test test-all test-gpu lint types bench clean

help:
	@echo "targets: train  test  test-all  test-gpu  lint  types  bench  install  clean    (see the top of the Makefile)"

install: $(STAMP)

# torch first and by itself: resolved together with the extras, pip would be free to pick any newer build of it.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --editable ".[test]"
	@rm -f $(VENV)/.torch_gtp-*
	@touch $@

train: $(STAMP)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train_lm.py $(TRAIN_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

test: lint types
	$(BIN)/python -m pytest -m "not slow and not gpu" $(TEST_ARGS)

test-all: lint types
	$(BIN)/python -m pytest $(TEST_ARGS)

# Without pytest: every rank runs the same session. GPU_TEST_ARGS="-k races" picks tests.
test-gpu: $(STAMP)
	PYTHON=$(BIN)/python RANKS_TIMEOUT=1500 tools/ranks_on_one_gpu.sh $(RANKS) $(BIN)/python -m tests.gpu.run $(GPU_TEST_ARGS)

bench: $(STAMP)
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS); done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
