# Sets up its own virtual environment and runs the project's jobs in it. `make help` lists them.
#
#   make demo VENV=~/agoq-venv       another environment
#   make test PYTEST_ARGS='-k info'  options for pytest
#   make demo TORCH=torch==2.14.1    another torch, named as for pip

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
# Test processes at once; 0 runs them all in one, for a debugger.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?= --out demo-out

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
STAMPS := $(VENV)/.stamps

BUILD_FILES := pyproject.toml setup.py python/agoq_ext/_version.py $(wildcard build_backend/*.py)
NATIVE_FILES := CMakeLists.txt $(shell find src -type f)
FORMATTED := $(shell find src tests/emulator -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format bench cuda cuda-report clean
.DELETE_ON_ERROR:
# Two jobs in one build directory would disturb each other; Ninja runs the compilers in parallel.
.NOTPARALLEL:

help:
	@echo 'make demo    train the demonstration uncompressed and compressed, and compare (2 to 6 minutes)'
	@echo 'make test    run the tests'
	@echo 'make test-slow  run the tests that take long: every combination of the emulated kernels, for one'
	@echo 'make lint    ruff, mypy, clang-format'
	@echo 'make format  reformat Python and native code'
	@echo 'make bench   run the benchmarks'
	@echo 'make cuda    compile the CUDA library for all architectures, with any torch'
	@echo 'make cuda-report  registers, spills and access widths of its kernels; fails on what is wrong'
	@echo 'make clean   remove what was built, but not $(VENV)'

demo: $(STAMPS)/package-demo $(STAMPS)/native
	$(VENV)/bin/agoq demo $(DEMO_ARGS)

# One OpenMP thread: the tests' tensors are small, and several processes share the machine.
test: $(STAMPS)/package-test $(STAMPS)/native
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -m "not slow" -n $(WORKERS) tests $(PYTEST_ARGS)

test-slow: $(STAMPS)/package-test $(STAMPS)/native
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -m slow -n $(WORKERS) tests $(PYTEST_ARGS)

lint: $(STAMPS)/package-dev $(STAMPS)/native
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@echo clang-format --dry-run --Werror src tests/emulator
	@$(VENV)/bin/clang-format --dry-run --Werror $(FORMATTED)

format: $(STAMPS)/package-dev
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	@echo clang-format -i src tests/emulator
	@$(VENV)/bin/clang-format -i $(FORMATTED)

bench: $(STAMPS)/package-bench $(STAMPS)/native
	$(PY) -m pytest -q benchmarks $(BENCH_ARGS)

# Into build/cuda; the installed libraries stay as they are.
cuda: $(STAMPS)/build-requirements
	@if $(PY) build_backend/toolchain.py nvcc; then \
		AGOQ_CUDA=ON AGOQ_CMAKE_TARGET=_C_cuda $(PY) setup.py --quiet build_ext --build-temp build/cuda; \
	else \
		echo 'make cuda: skipped: no nvcc was found in CUDACXX, CUDA_HOME, CUDA_PATH, /usr/local/cuda or PATH'; \
	fi

# Needs no GPU; cuobjdump and nvdisasm come from PyPI.
cuda-report: cuda
	@if $(PY) build_backend/toolchain.py nvcc >/dev/null; then \
		$(PIP) nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm && \
		$(PY) benchmarks/cuda_report.py build/cuda/cmake/_C_cuda.abi3.so --json build/cuda/report.json; \
	fi

clean:
	rm -rf build dist demo-out python/*.egg-info python/agoq_ext/*.so python/agoq_ext/include
	rm -f python/agoq_ext/_build_info.json $(STAMPS)/package-* $(STAMPS)/native
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# --- the environment ------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'make: $(PYTHON) must be Python 3.10 or later (PYTHON=... names another)'; exit 1; }
	@echo 'make: setting up $(VENV)'
	@$(PYTHON) -m venv $(VENV) || \
		{ echo 'make: $(PYTHON) -m venv failed; on Debian and Ubuntu it needs the package python3-venv'; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Without a GPU: the torch that the project is tested with, else the newest. With one: the newest, with CUDA.
$(STAMPS)/torch: $(STAMPS)/venv
	@if $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
		echo 'make: using the torch in $(VENV)'; \
	elif [ -n '$(TORCH)' ]; then \
		echo 'make: installing $(TORCH)'; $(PIP) '$(TORCH)'; \
	elif nvidia-smi >/dev/null 2>&1; then \
		echo 'make: installing torch with CUDA'; $(PIP) 'torch>=2.11'; \
	else \
		echo 'make: installing torch'; $(PIP) 'torch==2.13.0' || $(PIP) 'torch>=2.11'; \
	fi
	@touch $@

$(STAMPS)/build-requirements: $(STAMPS)/torch
	@echo 'make: installing the build tools'
	@$(PIP) 'setuptools>=77' 'cmake>=3.25' ninja 'pybind11>=2.13'
	@touch $@

# The package, editable, with one of its extras. It builds the native libraries, hence the second stamp.
$(STAMPS)/package-%: $(BUILD_FILES) $(STAMPS)/build-requirements
	@echo 'make: building and installing agoq-ext[$*]'
	@$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@ $(STAMPS)/native

$(STAMPS)/native: $(NATIVE_FILES)
	@echo 'make: rebuilding the native libraries'
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@
