# Needs make, Python >= 3.11 and, for the fast host kernels, a C++ compiler. `make help` lists the targets.

PYTHON ?= python3
DEMO_MODEL ?= tiny-relullama
# What the demo may use of the device: the rest of the model, plus about 40 % of its FFN.
DEMO_BUDGET ?= 9MiB
# Processes that run the tests, some 3 GB of memory each, or that compile in bench-deps.
WORKERS ?= 2
DEMO_PROMPT ?= Call me Ishmael. Some years ago

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
STAMP := $(VENV)/.installed-$(or $(VERSION),none)
SOURCES := pyproject.toml setup.py $(wildcard hostcompute/*src/*.cpp hostcompute/*src/*.h)

.PHONY: demo test lint build bench-deps bench clean help
.DEFAULT_GOAL := help

demo: build  ## generate text from the shipped model, with a device budget it does not fit
	$(BIN)/python scripts/generate.py --model $(DEMO_MODEL) --vram-budget $(DEMO_BUDGET) \
		--prompt "$(DEMO_PROMPT)" --max-new-tokens 64

test: build  ## run the tests (those marked slow: .venv/bin/pytest -m slow)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: build  ## ruff, the formatter and the type checker
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check

build: $(STAMP)  ## make .venv with the package, its test tools and the C++ libraries

# The FFI handler has to be built against the jaxlib that will load it, so that one is installed before and the build
# is not isolated from it.
export BUILD_REQUIREMENTS := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")

# The name of the stamp holds the Python version: another PYTHON makes another .venv.
$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: $(PYTHON) is $(or $(VERSION),not there); dynajax needs Python >= 3.11: make PYTHON=/path/to/python3.11" >&2; \
		exit 2; }
	@[ ! -d $(VENV) ] || [ "$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $(VERSION) ] || { \
		echo "$(VENV) is not Python $(VERSION): making it anew"; rm -rf $(VENV); }
	@[ -d $(VENV) ] || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "error: $(PYTHON) -m venv failed (on Debian: apt install python3-venv)" >&2; exit 2; }
	@rm -f hostcompute/_native*.so hostcompute/_ffi*.so
	@echo "installing into $(VENV), this takes minutes the first time"
	@$(BIN)/python -c "$$BUILD_REQUIREMENTS" > $(VENV)/build-requirements.txt
	@$(PIP) --requirement $(VENV)/build-requirements.txt
	@$(PIP) --no-build-isolation --editable '.[test]'
	@ls hostcompute/_native*.so >/dev/null 2>&1 || echo "note: the C++ library was not built (no compiler?):" \
		"everything works, the host computes in NumPy, slower; '$(BIN)/python setup.py build_ext --inplace' says why"
	@$(BIN)/python -c 'import sys; from hostcompute.ffi import unavailable as u; u() and sys.exit(u())' || echo "note:" \
		"without the FFI handler the host's half cannot be called inside a program on the CPU backend"
	@rm -f $(VENV)/.installed-* && touch $@

bench-deps: build  ## build llama-cpp-python for this machine into .venv, to compare with; 10 minutes or more
	@command -v $(or $(CXX),c++) >/dev/null || { \
		echo "error: $(or $(CXX),c++) is not there, llama.cpp is built from source (on Debian: apt install g++)" >&2; exit 2; }
	@echo "building llama-cpp-python in $(WORKERS) processes, 10 minutes or more"
	@CMAKE_ARGS=-DGGML_NATIVE=ON CMAKE_BUILD_PARALLEL_LEVEL=$(WORKERS) $(PIP) --no-binary llama-cpp-python 'llama-cpp-python>=0.3' || { \
		echo "error: llama-cpp-python was not installed: the last lines of pip above say why (no network, no compiler)" >&2; exit 2; }
	@$(BIN)/python -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'

# What `make bench` compares, and with what. The checkpoint is 2.2 GB, the files for llama.cpp are 4 GB more.
BENCH_SHAPE ?= 1.1b
BENCH_TYPES ?= F16 Q8_0 Q4_0
BENCH_ARGS ?= --rounds 5 --new-tokens 32
LLAMA_PYTHON ?= $(BIN)/python
SYNTH := runs/synth-$(BENCH_SHAPE)
SMALL := smollm2-135m
LLAMA := $(foreach type,$(BENCH_TYPES),llama.cpp:$(type))
SIDE_BY_SIDE := $(BIN)/python -m benchmarks.side_by_side --llama-python $(LLAMA_PYTHON) $(BENCH_ARGS)

bench: build bench-check bench-files  ## compare with llama.cpp on a synthetic ReLU model of 1.1B and on smollm2-135m, after bench-deps
	$(SIDE_BY_SIDE) --model $(SYNTH) --gguf '$(SYNTH)-{}.gguf' --out runs/side_by_side-synth-$(BENCH_SHAPE).json \
		--engines dynajax:dense:float16 dynajax:exact:float16 dynajax:exact:int8 dynajax:exact:int4 $(LLAMA)
	$(SIDE_BY_SIDE) --model $(SMALL) --gguf 'runs/$(SMALL)-{}.gguf' --out runs/side_by_side-$(SMALL).json \
		--engines dynajax:dense:float16 dynajax:dense:int8 dynajax:dense:int4 $(LLAMA)

.PHONY: bench-check bench-files bench-small
bench-files: $(BENCH_TYPES:%=$(SYNTH)-%.gguf) $(BENCH_TYPES:%=runs/$(SMALL)-%.gguf)  # what is there is not made again

bench-check:
	@$(LLAMA_PYTHON) -c 'import llama_cpp' 2>/dev/null || { \
		echo "error: $(LLAMA_PYTHON) has no llama_cpp: run make bench-deps before" >&2; exit 2; }

bench-small: | build
	$(BIN)/python scripts/fetch_model.py $(SMALL)

$(SYNTH)/config.json: | build
	rm -rf $(SYNTH).part
	$(BIN)/python -m benchmarks.make_checkpoint $(SYNTH).part --shape $(BENCH_SHAPE)
	mv $(SYNTH).part $(SYNTH)

$(SYNTH)-%.gguf: | $(SYNTH)/config.json
	$(BIN)/python -m benchmarks.to_gguf $(SYNTH) $@ --type $* --speed-only

runs/$(SMALL)-%.gguf: | bench-small
	$(BIN)/python -m benchmarks.to_gguf $(SMALL) $@ --type $*

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis hostcompute/_native*.so hostcompute/_ffi*.so
	find dynajax hostcompute predictors scripts tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 12
