# SPDX-License-Identifier: BSD-3-Clause
# `make demo` and `make test` do all their own set-up, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built

SOURCES := $(sort $(wildcard csrc/* csrc/*/*))
CXX_SOURCES := $(filter %.cpp %.h %.cu %.cuh,$(SOURCES) $(wildcard tests/emulated/*))
NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc))
CU_OBJECTS := $(if $(NVCC),$(patsubst csrc/cuda/%.cu,build/sm_90/%.o,$(wildcard csrc/cuda/*.cu)))

.DEFAULT_GOAL := help
.PHONY: help demo test lint format gpu-check sanitize clean venv

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BUILT)  ## train on handwritten digits, natively and accelerated (ARGS="--epochs 3")
	$(BIN)/python examples/mnist_mlp.py $(ARGS)

test: $(BUILT) $(CU_OBJECTS)  ## run the tests (ARGS="-k adamw")
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)  ## check style: ruff, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(INSTALLED)  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

BENCHMARKS := $(sort $(wildcard benchmarks/bench_*.py))
gpu-check:  ## on a machine with a GPU, with its own python3: build, CUDA tests, quick benchmarks
	TORCH_RENAISSANCE_CUDA=1 $(PYTHON) setup.py build_ext --inplace
	$(PYTHON) -m pytest -m cuda tests
	set -e; for benchmark in $(BENCHMARKS); do \
	  PYTHONPATH=. $(PYTHON) $$benchmark --quick; done

sanitize:  ## memcheck over the CUDA tests of the kernels, with the machine's python3
	compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(PYTHON) -m pytest -m cuda tests/test_ops.py tests/test_ops_refusals.py tests/test_kernels.py tests/test_loss.py \
	  tests/test_loss_*.py tests/test_lars.py tests/test_lars_*.py tests/test_augment_torchvision.py tests/test_augment_samples.py \
	  tests/test_augment_draw_batch.py tests/test_augment_refusals.py tests/test_order.py -x -q

clean:  ## remove what was built; .venv stays
	rm -rf build dist *.egg-info torch_renaissance/_C*.so $(BUILT) .pytest_cache .ruff_cache .hypothesis

# A change of pyproject.toml may bring new requirements; pip fetches only what is missing.
$(INSTALLED): pyproject.toml | venv
	$(BIN)/python -m pip install setuptools ninja torch torchvision
	$(BIN)/python -m pip install --no-build-isolation -e '.[demo,test,lint]'
	touch $@

$(BUILT): $(INSTALLED) setup.py $(SOURCES)
	$(BIN)/python setup.py build_ext --inplace
	touch $@

# The kernels are compiled even where torch has no CUDA.
build/sm_90/%.o: csrc/cuda/%.cu $(filter %.h %.cuh,$(SOURCES))
	@mkdir -p $(@D)
	$(NVCC) -c -arch=sm_90 -O3 -std=c++17 --expt-relaxed-constexpr -Icsrc $< -o $@

need = @$(1) >/dev/null 2>&1 || { echo '$(2)' >&2; exit 1; }
apt = on Debian: sudo apt-get install $(1)
venv: $(BIN)/python
ifneq ($(origin PYTHON),file)
	$(call need,test "$$($(PYTHON) -V)" = "$$($< -V)",$(VENV) was made with another Python than $(PYTHON): rm -r $(VENV) and try again.)
endif

$(BIN)/python:
	$(call need,command -v $(PYTHON),$(PYTHON) is not installed; $(call apt,python3 python3-venv python3-dev g++))
	$(call need,$(PYTHON) -c "import sys; assert sys.version_info[1] >= 10",$(PYTHON) is older than 3.10; name a newer one with PYTHON=python3.12.)
	$(call need,$(PYTHON) -c "import ensurepip",$(PYTHON) cannot make virtual environments; $(call apt,python3-venv))
	$(call need,$(PYTHON) -c "import os; import sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')",$(PYTHON) has no Python.h to build against; $(call apt,python3-dev))
	$(call need,command -v $${CXX:-g++},there is no C++ compiler; $(call apt,g++))
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
