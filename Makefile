# `make demo`, `make test`, `make lint` and `make bench` need only make and Python (3.11 or newer): each makes the
# virtual environment .venv and installs what it needs there, once. `make PYTHON=python3.12 test` picks an interpreter.
# `make test PYTHON=python3.13 LATEST=1` takes the newest releases instead of those in constraints.txt, as a user's
# `pip install` does, in an environment of its own; `rm -r .venv-latest` for releases that came out since.

PYTHON ?= python3
LATEST ?=
VENV := $(if $(LATEST),.venv-latest/$(notdir $(PYTHON)),.venv)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The variable: constraints in pip's own configuration do not count either.
INSTALL := $(if $(LATEST),PIP_CONSTRAINT=/dev/null $(PIP) install,$(PIP) install -c constraints.txt)
STAMPS := $(VENV)/.stamps

# Fastest on two cores; `make test PYTEST_ARGS='-x --lf'` adds options.
WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: help demo test install cut sweeps long lint types format bench docs clean
.NOTPARALLEL:
.SECONDARY:

help:
	@echo "make demo    run the guided example"
	@echo "make test    run the tests but for the slow sweeps (WORKERS=$(WORKERS), PYTEST_ARGS=...)"
	@echo "make cut     run those of them that meet torch and JAX most widely; LATEST=1 takes the newest releases"
	@echo "make sweeps  run the slow sweeps: an eighth of torch's operator database, many models and shapes"
	@echo "make long    run the rest of the operator database, thousands of random programs and 85 families of models"
	@echo "make lint    check style, format and types"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make bench   run the benchmarks"
	@echo "make docs    build the documentation in build/site, warnings as errors"
	@echo "make clean   remove build results and caches (the environment stays)"

demo: $(STAMPS)/examples
	$(BIN)/python examples/private_digits.py

# These tests compile much and run little: they are faster without LLVM's optimisation of the machine code, and with the
# older code generator of the pinned release (newer ones have none), which takes a third of the time. The memory that XLA
# plans is the same. The sweeps run as a user's programs do.
FAST := --xla_backend_optimization_level=0 \
	$(if $(LATEST),,--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1)
QUICK = XLA_FLAGS="$(XLA_FLAGS) $(FAST)" $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

test: $(STAMPS)/test $(STAMPS)/examples
	$(QUICK) $(PYTEST_ARGS)

install: $(STAMPS)/test

# What a release of torch or JAX changes shows here first.
CUT := packaging readme jax_impl/clipping jax_impl/microbatching jax_impl/scanning bridge/as_jax bridge/call/as_torch \
	bridge/call/autograd bridge/global_state bridge/lift bridge/lowerings/lowerings bridge/lowerings/operator_edges \
	bridge/record/checkpoints bridge/record/distributions bridge/record/kernels bridge/threads torch_api/clipping

cut: install
	$(PIP) list | grep -E '^(torch|torchax|jax|jaxlib|numpy) '
	$(QUICK) $(foreach part,$(CUT),$(subst ./,,tests/$(dir $(part))test_$(notdir $(part)).py)) $(PYTEST_ARGS)

sweeps: $(STAMPS)/test $(STAMPS)/examples
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

long: $(STAMPS)/test
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0" $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(PYTEST_ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

# mypy finds neither a package whose folder has another name nor one behind an editable install's import hook, so it is
# (as is the documentation's generator) shown the packages, and nothing else of the repository, under the name that they are installed as.
TYPED := build/typing/microtome
define LINK_PACKAGES
@rm -rf $(TYPED) && mkdir -p $(TYPED)
@for part in __init__.py py.typed bridge jax_impl torch_api; do ln -s ../../../$$part $(TYPED)/$$part; done
endef

types: $(STAMPS)/dev
	$(LINK_PACKAGES)
	MYPYPATH=build/typing $(BIN)/mypy -p microtome

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMPS)/bench
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/slices.py
	$(BIN)/python benchmarks/clipping.py
	$(BIN)/python benchmarks/operators.py

docs: $(STAMPS)/docs
	$(LINK_PACKAGES)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build dist microtome.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# The build backend and torch come first, each as a step of its own: with torch settled, nothing that depends on it
# can pull another build of it, and with the backend in place no step needs a build environment of its own.
$(STAMPS)/base: constraints.txt
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(if $(LATEST),,$(INSTALL) $$(grep '^torch==' constraints.txt))
	mkdir -p $(STAMPS) && touch $@

# One stamp for each extra of pyproject.toml.
$(STAMPS)/%: $(STAMPS)/base pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[$*]'
	touch $@
