# make test        lint, then the quick tests
# make test-study  quick tests of preact_kernels.study
# make test-tools  quick tests of the benchmarks and of the host that runs the CUDA kernels
# make test-packages
#                  installs diffusers and MONAI in a folder of their own (48 MB) and converts models
#                  of theirs
# make test-full   lint, then every test
# make build       builds the libraries in place; the CUDA library for the GPUs here, else for 9.0
# make wheel       builds and checks dist/: a source distribution, and a wheel with the CPU library for
#                  every Python and torch
# make check-wheel installs a wheel in an environment of its own and trains with it, without a
#                  compiler; PYTHON=python3.12 TORCH=2.11.0 WHEEL=dist/....whl choose
# make check-release TAG=v0.1.0
#                  checks that the sources and the changelog are those of the version of a tag
# make bench       the benchmarks; without a GPU, the CUDA library is not built for them
# make report      tables and plots of README.md and docs/, from bench/results/
# make docs        the site of the documentation in build/site, in an environment of its own
# make notebook    executes examples/identity_mappings.ipynb and writes its outputs into it
# make lint        ruff, clang-format and mypy, changes nothing
# make format      the same, changes files
# make compile-triton
#                  compiles every Triton kernel for an H100, without a GPU, and reports spills;
#                  make compile-triton-full for more GPUs, shapes, dtypes and the newest Triton
# make check-oldest
#                  builds with the oldest torch and runs the tests that depend on its version, in an
#                  environment of its own (5 GB); TESTS=tests runs all quick tests
# make check-torch TORCH=2.12.1
#                  the same with another torch; make check-newest with the newest tested one
# make check-cpu   tests of the CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer and
#                  ThreadSanitizer; ARGS="address --isa generic" selects
# make check-gpu   tests of the CUDA kernels under compute-sanitizer, on a GPU;
#                  SANITIZERS="memcheck" selects tools
# make gpu-report OUT=folder
#                  builds, tests and measures on a GPU machine (bench/gpu_report.py);
#                  ARGS="--parts tests bench" chooses parts, ARGS="--networks resnet-164" networks
# make gpu-packages
#                  packs diffusers and MONAI into build/gpu-packages.tar.xz; copied with the tree, it
#                  serves a GPU machine without them: gpu-report unpacks it
# make clean       removes build products, keeps the virtual environment
#
# check-gpu and gpu-report use $(PYTHON) with torch and pytest installed, and no network.
# ARGS="..." is passed to pytest, check-cpu, the benchmarks or the report.

PYTHON ?= python3
VENV ?= .venv
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
# Test processes: few if they share a GPU.
JOBS ?= $(if $(GPUS),2,$(shell nproc))
ARGS ?=
OUT ?=

BIN := $(VENV)/bin
# Images of containers set this. Without bytecode files every process compiles torch again: 3 s.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles to bytecode what it imports: pip would compile 20,000 files.
PIP_FLAGS := -q --disable-pip-version-check --no-compile
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_FLAGS)
# With folders: their times change when a file is deleted.
CSRC := $(shell find csrc 2>/dev/null)
CXX_TESTS := testbed/cuda_on_host tests/kernels/cpu_variants
CXX_FILES := $(filter %.h %.cuh %.cpp %.cu,$(CSRC) $(wildcard $(addsuffix /*,$(CXX_TESTS)) bench/*.cu))

# Stamp files. CPU_BUILD is the CPU library alone, BUILD both libraries.
REQUIREMENTS := $(VENV)/.requirements
EDITABLE := $(VENV)/.editable
CPU_BUILD := $(VENV)/.build-cpu
BUILD := $(VENV)/.build
ARCHITECTURES := $(VENV)/.architectures

# The tested versions in pyproject.toml, oldest first.
tested = $(shell sed -n 's/^tested-$(1) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
OLDEST_TORCH := $(firstword $(call tested,torch))
NEWEST_TORCH := $(lastword $(call tested,torch))
TORCH ?= $(OLDEST_TORCH)

# A second Triton, in its own folder; requirements-dev.txt has the first.
NEWEST_TRITON_VERSION := $(lastword $(call tested,triton))
NEWEST_TRITON := $(VENV)/triton-$(NEWEST_TRITON_VERSION)

# What `make check-wheel` installs: the torch of requirements-dev.txt, if TORCH is not given.
DEVELOPMENT_TORCH := $(shell sed -n 's/^torch==//p' requirements-dev.txt)
check-wheel: TORCH := $(if $(filter file,$(origin TORCH)),$(DEVELOPMENT_TORCH),$(TORCH))
WHEEL ?= $(wildcard dist/*.whl)
WHEEL_ENVIRONMENT = $(VENV)-wheel

# Packages with models, in their own folder.
PACKAGES := $(VENV)/packages

# The environment that builds the site of the documentation.
DOCS := $(VENV)-docs

# Time limit of `make bench`.
BENCH_SECONDS ?= 560
START := $(shell date +%s)

SANITIZERS ?= memcheck initcheck racecheck synccheck
SANITIZER_SECONDS ?= 130

# Compute capabilities that the CUDA library is built for: those of the GPUs here, else 9.0. If the
# list is empty, setup.py builds all.
CAPABILITIES := $(if $(GPUS),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u))
ifeq ($(origin TORCH_CUDA_ARCH_LIST),undefined)
TORCH_CUDA_ARCH_LIST := $(or $(filter-out 5.% 6.% 7.%,$(CAPABILITIES)),9.0)
test-full check-torch: TORCH_CUDA_ARCH_LIST :=
endif

# Outside `make test`: no other folder uses what these test.
STUDY_TESTS := tests/study
TOOL_TESTS := tests/bench tests/kernels/test_cuda_on_host.py
# What depends on the version of torch. The numerics of the kernels do not.
VERSION_TESTS := tests/behaviour tests/convert tests/stage tests/ops/test_activations.py \
  tests/ops/test_backend.py tests/ops/test_double_backward.py tests/ops/test_norms.py \
  tests/ops/test_layout.py tests/ops/test_native_calls.py \
  $(addprefix --ignore tests/,behaviour/test_accuracy.py behaviour/test_determinism.py \
    stage/test_resnet_1001.py)
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: always build test test-study test-tools test-packages test-full compile-triton \
  compile-triton-full cuda-on-host check-oldest oldest-environment check-newest check-torch check-cpu \
  check-gpu bench report docs notebook lint format gpu-report gpu-packages wheel check-wheel check-release clean

build: $(BUILD)

test: lint $(BUILD) compile-triton cuda-on-host
	@$(PYTEST) -m "not slow" $(addprefix --ignore ,$(STUDY_TESTS) $(TOOL_TESTS)) $(ARGS)

test-study: $(BUILD) cuda-on-host
	@$(PYTEST) -m "not slow" $(STUDY_TESTS) $(ARGS)

test-tools: $(BUILD) cuda-on-host
	@$(PYTEST) -m "not slow" $(TOOL_TESTS) $(ARGS)

test-packages: $(CPU_BUILD) $(PACKAGES)/.requirements
	@PYTHONPATH=$(abspath $(PACKAGES)) $(PYTEST) tests/convert/test_norm_act_models.py \
	  tests/convert/test_subclasses.py $(ARGS)

test-full: lint $(BUILD) compile-triton-full cuda-on-host
	@$(PYTEST) $(ARGS)

# Compiled again only where a kernel, a launcher, the script or Triton has changed.
TRITON_KERNELS := tests/kernels/compile_triton.py testbed/triton_driver.py $(REQUIREMENTS) preact_kernels/kernels/triton \
  $(wildcard preact_kernels/torch_compat.py preact_kernels/kernels/*.py \
    preact_kernels/kernels/triton/*.py)

compile-triton: build/triton/.quick
compile-triton-full: build/triton/.oldest build/triton/.newest

build/triton/.quick: $(TRITON_KERNELS)
	@$(BIN)/python -m tests.kernels.compile_triton --quick --capabilities 90 \
	  --out build/triton/quick.csv
	@touch $@

build/triton/.oldest: $(TRITON_KERNELS)
	@$(BIN)/python -m tests.kernels.compile_triton --out build/triton/oldest.csv
	@touch $@

# Blocks are chosen with the oldest Triton: the newest may spill a few registers for rare shapes.
build/triton/.newest: $(TRITON_KERNELS) $(NEWEST_TRITON)
	@PYTHONPATH=$(NEWEST_TRITON) $(BIN)/python -m tests.kernels.compile_triton \
	  --capabilities 80 90 100 --stack-bytes 16 --out build/triton/newest.csv
	@touch $@

# The CUDA kernels for the host, which pytest would otherwise compile at start-up.
cuda-on-host: $(BUILD)
	@$(BIN)/python -m testbed.cuda_on_host.build

check-oldest:
	@$(MAKE) check-torch TORCH=$(OLDEST_TORCH)

check-newest:
	@$(MAKE) check-torch TORCH=$(NEWEST_TORCH)

# In a copy of the tree, which has no libraries built with another torch. The CUDA library is built for
# every architecture of a release. With ccache, kernels that were compiled before come out of its cache:
# they include nothing of torch. Older versions of torch do not call ccache by themselves.
export CCACHE_BASEDIR := $(CURDIR)
CCACHE := $(shell command -v ccache)
CHECK := $(VENV)-torch-$(TORCH)
CHECK_PYTHON := $(abspath $(CHECK))/bin/python
check-torch: $(CHECK)/.requirements
	@rm -rf $(CHECK)/tree && mkdir $(CHECK)/tree
	@git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C $(CHECK)/tree
	@$(if $(CCACHE),ln -sf $(CCACHE) $(CHECK)/bin/c++)
	@echo "Building against torch $(TORCH)"
	@cd $(CHECK)/tree && PREACT_KERNELS_NATIVE=0 \
	  $(CHECK_PYTHON) -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@cd $(CHECK)/tree && PATH="$(abspath $(CHECK))/bin:$$PATH" \
	  TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)" \
	  $(CHECK_PYTHON) setup.py -q build_ext --inplace >build.log 2>&1 || { cat build.log >&2; exit 1; }
	@cd $(CHECK)/tree && $(CHECK_PYTHON) -m pytest -q -rs tests/behaviour/test_libraries.py \
	  tests/kernels/test_cuda_build.py
	@cd $(CHECK)/tree && $(CHECK_PYTHON) -m pytest -n $(JOBS) -m "not slow" \
	  $(or $(TESTS),$(VERSION_TESTS)) $(ARGS)

# The environment of `make check-oldest`, most of which is a download.
oldest-environment: $(VENV)-torch-$(OLDEST_TORCH)/.requirements

$(VENV)-torch-%/.requirements: requirements-test.txt requirements-models.txt
	@echo "Installing torch $* in $(VENV)-torch-$*"
	@$(PYTHON) -m venv $(VENV)-torch-$*
	@$(VENV)-torch-$*/bin/python -m pip install $(PIP_FLAGS) \
	  torch==$* "setuptools>=77" -r requirements-test.txt
	@$(VENV)-torch-$*/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements-models.txt
	@touch $@

check-cpu: $(EDITABLE)
	@$(BIN)/python -m tests.kernels.cpu_variants.check $(ARGS)

# From the object files of the build in place. The CUDA library is left out: it would tie the wheel to
# a major version of CUDA. Torch's libraries are not put into the wheel; no other library needs bundling.
wheel: $(CPU_BUILD)
	@rm -rf build/wheel dist/preact_kernels-*
	@PATH="$(abspath $(BIN)):$$PATH" PREACT_KERNELS_CUDA=0 $(BIN)/python setup.py -q sdist \
	  build --build-lib build/wheel/lib \
	  bdist_wheel --skip-build --bdist-dir build/wheel/bdist --dist-dir build/wheel \
	  >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  --wheel-dir dist build/wheel/*.whl 2>build/wheel/auditwheel.log || { \
	  cat build/wheel/auditwheel.log >&2; exit 1; }
	@PK_WHEEL="$$(echo dist/*.whl)" $(BIN)/python -m pytest -q tests/wheel $(ARGS)
	@ls -s --block-size=K dist

$(if $(filter wheel,$(MAKECMDGOALS)),check-wheel: wheel)
check-wheel:
	@test -f "$(WHEEL)" || { echo "expected one wheel, got '$(WHEEL)'; make wheel builds it" >&2; exit 2; }
	@rm -rf $(WHEEL_ENVIRONMENT)
	@$(PYTHON) -m venv $(WHEEL_ENVIRONMENT)
	@echo "Installing $(WHEEL) with torch $(TORCH) in $(WHEEL_ENVIRONMENT)"
	@echo torch==$(TORCH) >$(WHEEL_ENVIRONMENT)/constraints.txt
	@$(WHEEL_ENVIRONMENT)/bin/python -m pip install $(PIP_FLAGS) \
	  -c $(WHEEL_ENVIRONMENT)/constraints.txt $(WHEEL)
	@cd $(WHEEL_ENVIRONMENT) && env -i PATH= HOME=/nonexistent \
	  bin/python -I -W error:preact_kernels "$(CURDIR)/tests/wheel/check_installed.py"
	@cd $(WHEEL_ENVIRONMENT) && env -i PATH= HOME=/nonexistent \
	  bin/python -I -m preact_kernels check --backends cpu --dtypes float32

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' preact_kernels/__init__.py)
check-release:
	@test "$(TAG)" = "v$(VERSION)" || { \
	  echo "TAG: expected v$(VERSION), the __version__ of the package, got $(TAG)" >&2; exit 1; }
	@grep -Eq '^## \[$(subst .,\.,$(VERSION))\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md || { \
	  echo "CHANGELOG.md: expected a section '## [$(VERSION)] - YYYY-MM-DD'" >&2; exit 1; }

# Without the caching allocator, compute-sanitizer sees accesses past the end of a tensor.
check-gpu:
	@failed=; for tool in $(SANITIZERS); do \
	  echo "compute-sanitizer --tool $$tool, $(SANITIZER_SECONDS) s at most"; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 PK_SANITIZER=$$tool timeout -s INT -k 20 $(SANITIZER_SECONDS) \
	    compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PYTHON) -m pytest -q -rfEs --tb short -p no:cacheprovider -p no:xdist \
	    -m "not slow and not not_under_sanitizer" tests/kernels/test_cuda.py \
	    tests/kernels/test_cuda_conv*.py tests/kernels/test_gpu_conv.py \
	    $(ARGS) || failed="$$failed $$tool (exit status $$?)"; \
	done; test -z "$$failed" || { echo "not passed:$$failed; 124 and 137 are out of time" >&2; exit 1; }

# The time limit includes setting up.
bench: $(if $(GPUS),$(BUILD),$(CPU_BUILD))
	@$(BIN)/python -m bench \
	  --time-limit $$(($(START) + $(BENCH_SECONDS) - $$(date +%s))) $(ARGS)

report: $(EDITABLE)
	@$(BIN)/python -m bench.report $(ARGS)

# A warning about a docstring begins with "griffe", and is not an error to zensical.
docs: $(DOCS)/.requirements
	@rm -rf build/site .cache
	@$(DOCS)/bin/python docs/site/sources.py
	@$(DOCS)/bin/zensical build --strict >build/docs.log 2>&1 && ! grep -q '^griffe' build/docs.log || \
	  { cat build/docs.log >&2; exit 1; }

$(DOCS)/.requirements: requirements-docs.txt
	@echo "Installing requirements-docs.txt in $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install $(PIP_FLAGS) -r requirements-docs.txt
	@touch $@

notebook: $(CPU_BUILD)
	@$(BIN)/python -m tests.behaviour.notebooks

lint: $(REQUIREMENTS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --no-error-summary
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))

format: $(REQUIREMENTS)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

$(REQUIREMENTS): requirements-dev.txt requirements-test.txt requirements-models.txt
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment: it is missing, or lacks venv or ensurepip" \
	    "(python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	@echo "Installing requirements-dev.txt in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -r requirements-dev.txt
	@$(PIP_INSTALL) --no-deps -r requirements-models.txt
	@touch $@

# Editable and uncompiled: the rules below compile in place, and only what changed.
$(EDITABLE): $(REQUIREMENTS) setup.py pyproject.toml
	@echo "Installing preact_kernels in $(VENV)"
	@PREACT_KERNELS_NATIVE=0 $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# PATH is for ninja, which compiles in parallel. If nothing could be compiled, setup.py says why in a
# line "preact_kernels: ...", and no stamp is made, so that the next run tries again.
COMPILE = PATH="$(abspath $(BIN)):$$PATH" TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)" \
  $(BIN)/python setup.py -q build_ext --inplace \
  >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }

$(BUILD): $(EDITABLE) $(CSRC) $(ARCHITECTURES)
	@echo "Compiling csrc"
	@$(COMPILE)
	@grep '^No CUDA library' $(VENV)/build.log || true
	@grep '^preact_kernels: ' $(VENV)/build.log || touch $@ $(CPU_BUILD)

# Holds the list, and is written only when that changes.
$(ARCHITECTURES): $(REQUIREMENTS) always
	@echo "$(TORCH_CUDA_ARCH_LIST)" | cmp -s - $@ || echo "$(TORCH_CUDA_ARCH_LIST)" >$@

$(CPU_BUILD): $(EDITABLE) $(CSRC)
	@echo "Compiling csrc/cpu"
	@export PREACT_KERNELS_CUDA=$${PREACT_KERNELS_CUDA:-0}; $(COMPILE)
	@grep '^preact_kernels: ' $(VENV)/build.log || touch $@

$(NEWEST_TRITON): $(REQUIREMENTS)
	@echo "Installing Triton $(NEWEST_TRITON_VERSION) in $@"
	@$(PIP_INSTALL) --no-deps --target $@ triton==$(NEWEST_TRITON_VERSION)
	@touch $@

$(PACKAGES)/.requirements: $(REQUIREMENTS) requirements-packages.txt
	@echo "Installing requirements-packages.txt in $(PACKAGES)"
	@rm -rf $(PACKAGES)
	@$(PIP_INSTALL) --no-deps --target $(PACKAGES) -r requirements-packages.txt
	@touch $@

gpu-packages: $(PACKAGES)/.requirements
	@mkdir -p build
	@tar -C $(PACKAGES) --exclude __pycache__ --exclude ./bin -cJf build/gpu-packages.tar.xz .

gpu-report:
	@test -n "$(OUT)" || { echo "usage: make gpu-report OUT=folder" >&2; exit 2; }
	@$(PYTHON) -m bench.gpu_report "$(OUT)" $(ARGS)

clean:
	@rm -rf build dist *.egg-info preact_kernels/*.so $(BUILD) $(CPU_BUILD) $(ARCHITECTURES)
	@rm -rf .benchmarks .cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +
