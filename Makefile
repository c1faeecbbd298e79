# make test        lint, then the quick tests
# make test-full   lint, then every test
# make compile-triton
#                  every Triton kernel compiled for GPUs that need not be here, and a report
# make check-gpu   the CUDA kernels' tests under compute-sanitizer, on a GPU: stray accesses, races
# make bench       the benchmarks
# make report      the README's tables and plots out of bench/results/
# make lint        ruff and clang-format, changing nothing
# make format      the same, changing files
# make gpu-report OUT=folder
#                  build, quick tests, benchmarks and the hottest kernels, saved in a folder; uses
#                  $(PYTHON) as it is, with torch already installed, and no network
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

# Beside the Triton of requirements-dev.txt, in a folder of its own.
NEWEST_TRITON_VERSION := 3.9.0
NEWEST_CAPABILITIES ?= 90
COMPILE_ARGS ?= --quick
NEWEST_TRITON := $(VENV)/triton-$(NEWEST_TRITON_VERSION)

# Seconds for all of bench.
BENCH_SECONDS ?= 560
START := $(shell date +%s)

# Seconds for all of gpu-report, and the most that its parts but the benchmarks may take.
REPORT_SECONDS ?= 520
REPORT_BUILD_SECONDS ?= 150
REPORT_TEST_SECONDS ?= 180
REPORT_HOTSPOTS_SECONDS ?= 60

.PHONY: test test-full compile-triton cuda-on-host check-gpu bench report lint format gpu-report clean

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

check-gpu: $(BUILD)
	@for tool in memcheck racecheck synccheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m pytest -p no:xdist -m "not slow" tests/test_cuda.py tests/test_cuda_conv.py \
	    $(ARGS) || exit 1; \
	done

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

$(REQUIREMENTS): requirements-dev.txt
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

# Each part writes its own file as it goes, and a part that fails stops no other.
gpu-report: export PYTHONUNBUFFERED = 1
gpu-report:
	@test -n "$(OUT)" || { echo "usage: make gpu-report OUT=folder" >&2; exit 2; }
	@mkdir -p "$(OUT)" && rm -f "$(OUT)/summary.txt"
	@end=$$(($$(date +%s) + $(REPORT_SECONDS))); \
	part() { \
	  name=$$1 seconds=$$2; shift 2; \
	  { timeout -s INT -k 10 "$$seconds" "$$@"; \
	    echo "$$name: exit status $$?" >>"$(OUT)/summary.txt"; } 2>&1 | tee "$(OUT)/$$name.txt"; \
	}; \
	part build $(REPORT_BUILD_SECONDS) $(PYTHON) setup.py -q build_ext --inplace; \
	part tests $(REPORT_TEST_SECONDS) $(PYTHON) -m pytest -m "not slow"; \
	left=$$((end - $(REPORT_HOTSPOTS_SECONDS) - $$(date +%s))); \
	part bench $$left $(PYTHON) -m bench --out "$(OUT)" --time-limit $$((left - 20)) $(ARGS); \
	part hotspots $(REPORT_HOTSPOTS_SECONDS) $(PYTHON) -m bench.hotspots; \
	cat "$(OUT)/summary.txt"; ! grep -qv 'exit status 0$$' "$(OUT)/summary.txt"

clean:
	@rm -rf build dist *.egg-info preact_kernels/*.so $(BUILD)
	@rm -rf .benchmarks .hypothesis .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
