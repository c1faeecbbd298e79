# make test        lint, then the quick tests
# make test-full   lint, then every test
# make compile-triton
#                  every Triton kernel compiled for GPUs that need not be here, and a report
# make check-oldest
#                  installs the package with the oldest torch, in an environment of its own (5 GB),
#                  loads both libraries, and runs the quick tests
# make check-torch TORCH=2.12.1
#                  the same with another torch; make check-newest with the newest that was tested
# make check-gpu   the CUDA kernels' tests under compute-sanitizer, on a GPU: memory errors, races;
#                  SANITIZERS="memcheck" selects tools
# make bench       the benchmarks
# make report      the README's tables and plots out of bench/results/
# make lint        ruff and clang-format, changing nothing
# make format      the same, changing files
# make gpu-report OUT=folder
#                  build, quick tests, benchmarks and the hottest kernels, saved in a folder
#                  (bench/gpu_report.py); ARGS="--resume folder" keeps what that folder has
# check-gpu and gpu-report use $(PYTHON) as it is, with torch and pytest installed, and no network.
# make clean       removes what was built, keeps the virtual environment
#
# ARGS="..." goes to pytest, to the benchmarks or to the report.

PYTHON ?= python3
VENV ?= .venv
# Processes that run tests: few where they share a GPU.
JOBS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 2 || nproc)
ARGS ?=
OUT ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check
# Folders are listed too: their times change when a file goes.
CSRC := $(shell find csrc 2>/dev/null)
CXX_FILES := $(filter %.h %.cuh %.cpp %.cu,$(CSRC) $(wildcard tests/cuda_on_host/*))

# Stamps, each made again when what it depends on changes.
REQUIREMENTS := $(VENV)/.requirements
EDITABLE := $(VENV)/.editable
BUILD := $(VENV)/.build

# The versions that pyproject.toml names, the oldest first.
tested = $(shell sed -n 's/^tested-$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
OLDEST_TORCH := $(firstword $(call tested,torch))
NEWEST_TORCH := $(lastword $(call tested,torch))
TORCH ?= $(OLDEST_TORCH)

# Beside the Triton of requirements-dev.txt, in a folder of its own.
NEWEST_TRITON_VERSION := $(lastword $(call tested,triton))
NEWEST_CAPABILITIES ?= 90
COMPILE_ARGS ?= --quick
NEWEST_TRITON := $(VENV)/triton-$(NEWEST_TRITON_VERSION)

# Seconds for all of bench.
BENCH_SECONDS ?= 560
START := $(shell date +%s)

SANITIZERS ?= memcheck racecheck synccheck
SANITIZER_SECONDS ?= 170

.PHONY: test test-full compile-triton cuda-on-host check-oldest check-newest check-torch check-gpu \
  bench report lint format gpu-report clean

test: lint $(BUILD) compile-triton cuda-on-host
	@$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-full: NEWEST_CAPABILITIES = 80 90 100
test-full: COMPILE_ARGS =
test-full: lint $(BUILD) compile-triton cuda-on-host
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# The kernels as the oldest and the newest Triton that are served compile them, without a GPU.
compile-triton: $(BUILD) $(NEWEST_TRITON)
	@$(BIN)/python -m tests.compile_triton $(COMPILE_ARGS) --out build/triton/oldest.csv
	@PYTHONPATH=$(NEWEST_TRITON) $(BIN)/python -m tests.compile_triton $(COMPILE_ARGS) \
	  --capabilities $(NEWEST_CAPABILITIES) --out build/triton/newest.csv

# The CUDA kernels as the tests run them without a GPU; pytest would compile them as it starts.
cuda-on-host: $(BUILD)
	@$(BIN)/python -m tests.cuda_on_host.build

check-oldest:
	@$(MAKE) check-torch TORCH=$(OLDEST_TORCH)

check-newest:
	@$(MAKE) check-torch TORCH=$(NEWEST_TORCH)

# In a copy of the tree, so that nothing that was built with another torch is found. Without
# test_cuda_build.py, which reads what nvcc says of sources that do not depend on torch.
CHECK := $(VENV)-torch-$(TORCH)
CHECK_PYTHON := $(abspath $(CHECK))/bin/python
check-torch: $(CHECK)/.requirements
	@rm -rf $(CHECK)/tree && mkdir $(CHECK)/tree
	@git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C $(CHECK)/tree
	@echo "Building against torch $(TORCH)"
	@cd $(CHECK)/tree && PATH="$(abspath $(CHECK))/bin:$$PATH" \
	  $(CHECK_PYTHON) -m pip install -q --no-build-isolation -e .
	@cd $(CHECK)/tree && $(CHECK_PYTHON) -m pytest -q -rs tests/test_libraries.py
	@cd $(CHECK)/tree && $(CHECK_PYTHON) -m pytest -n $(JOBS) -m "not slow" \
	  --ignore tests/test_cuda_build.py $(ARGS)

$(VENV)-torch-%/.requirements: requirements-test.txt
	@echo "Installing torch $* in $(VENV)-torch-$*"
	@$(PYTHON) -m venv $(VENV)-torch-$*
	@$(VENV)-torch-$*/bin/python -m pip install -q --disable-pip-version-check \
	  torch==$* "setuptools>=77" -r requirements-test.txt
	@touch $@

# Without caching, tensors do not share blocks of memory, and an access past the end of one is seen.
check-gpu:
	@failed=; for tool in $(SANITIZERS); do \
	  echo "compute-sanitizer --tool $$tool, $(SANITIZER_SECONDS) s at most"; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT -k 20 $(SANITIZER_SECONDS) \
	    compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PYTHON) -m pytest -q -rfEs --tb short -p no:cacheprovider -p no:xdist \
	    -m "not slow and not not_under_sanitizer" tests/test_cuda.py tests/test_cuda_conv.py \
	    $(ARGS) || failed="$$failed $$tool (exit status $$?)"; \
	done; test -z "$$failed" || { echo "not passed:$$failed; 124 and 137 are out of time" >&2; exit 1; }

# What setting up took is taken from the time to measure.
bench: $(BUILD)
	@$(BIN)/python -m bench \
	  --time-limit $$(($(START) + $(BENCH_SECONDS) - $$(date +%s))) $(ARGS)

report: $(BUILD)
	@$(BIN)/python -m bench.report $(ARGS)

lint: $(REQUIREMENTS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

format: $(REQUIREMENTS)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

$(REQUIREMENTS): requirements-dev.txt requirements-test.txt
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment: it is missing, or lacks venv or ensurepip" \
	    "(python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	@echo "Installing requirements-dev.txt in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -r requirements-dev.txt
	@touch $@

# Editable and uncompiled: the next rule compiles in place, and only what changed.
$(EDITABLE): $(REQUIREMENTS) setup.py pyproject.toml
	@echo "Installing preact_kernels in $(VENV)"
	@PREACT_KERNELS_NATIVE=0 $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# PATH is for ninja, which compiles in parallel. Where nothing could be compiled, setup.py says why
# and there is no stamp, so that the next run tries again.
$(BUILD): $(EDITABLE) $(CSRC)
	@echo "Compiling csrc"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py -q build_ext --inplace \
	  >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	@grep '^preact_kernels: ' $(VENV)/build.log || touch $@

$(NEWEST_TRITON): $(REQUIREMENTS)
	@echo "Installing Triton $(NEWEST_TRITON_VERSION) in $@"
	@$(PIP_INSTALL) --no-deps --target $@ triton==$(NEWEST_TRITON_VERSION)
	@touch $@

gpu-report:
	@test -n "$(OUT)" || { echo "usage: make gpu-report OUT=folder" >&2; exit 2; }
	@$(PYTHON) -m bench.gpu_report "$(OUT)" $(ARGS)

clean:
	@rm -rf build dist *.egg-info preact_kernels/*.so $(BUILD)
	@rm -rf .benchmarks .hypothesis .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +
