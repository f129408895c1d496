# Everything starts from a bare machine with Python 3.11 to 3.14 and pip.
#   make train   the main job: GraphSAGE on a generated graph, through the global store
#   make test    the tests that any change can break; make test-rest, the others; make test-all, the long ones too
#   make test-gpu sanitize-gpu bench-gpu    what needs GPUs
#   make test-oldest test-newest    a cross-section of them with other versions of what is installed
#   make faults    processes killed, stopped and starved at random, hundreds of times
#   make lint type docs wheel test-wheel dist bench clean
# Options of the main job:  make train ARGS="trainer.epochs=2 trainer.ranks=2"

PYTHON ?= $(shell for v in python3.12 python3.11 python3.13 python3.14 python3; do \
	"$$v" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$v && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test test-rest test-all test-oldest test-newest test-gpu sanitize-gpu faults lint type docs wheel dist test-wheel bench bench-gpu clean setup
.DEFAULT_GOAL := train

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed; none found on the PATH. Install one, or say: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[dev]"
	$(BIN)/dgl-mgpu install-dgl
	@touch $@

train: setup
	$(BIN)/dgl-mgpu train $(ARGS)

# Four workers keep two cores busy, since many tests wait for processes; without threads of OpenMP,
# which would keep each other waiting. All is
# tested as on a machine without a GPU; what needs some is test-gpu's.
PYTEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --dist loadgroup
# Of one store over machines, but for its planning.
SPAN_TESTS := $(addprefix test_span, .py _batches.py _build.py _errors.py _rows.py _training.py) test_mapped_machines.py
# What test leaves out and test-rest runs: whole training runs and commands, faults of several
# processes, emulated kernels, solver's proofs, pages that train, the benchmarks' own tests.
REST := $(addprefix tests/, benchmarks kernels faults train/launch train/fullgraph test_main.py test_cli.py \
	test_partition_option.py \
	test_doctor.py docs/test_code.py docs/test_tutorial.py docs/test_pictures.py docs/test_extending.py comm/test_communicator.py comm/test_signing.py comm/test_network.py utils/test_interrupts.py \
	$(addprefix distributed/, test_part_files.py test_edge_attention.py test_memory.py test_explain.py exchange/test_in_flight.py exchange/test_by_machine.py) \
	layerwise_inference/test_inference_ranks.py layerwise_inference/test_inference_machines.py dgl/test_without_libdgl.py dgl/test_wheel.py \
	dgl/shared_graphs dgl/test_import.py dgl/test_shared_memory.py dgl/nn/test_training.py \
	models/gcn distributed/test_message_functions.py ops/test_large.py report/test_placement.py \
	$(addprefix placement/test_, same_plans.py optimality.py) \
	$(addprefix store/, test_embedding.py test_feature_dtypes.py $(SPAN_TESTS) test_walks_over_machines.py test_partitioned.py $(addprefix memory/test_, shared_memory.py segment.py faults_gpu.py gpu_store.py)) \
	$(addprefix train/, test_faults.py test_trained_run.py test_going_on.py test_optimizer.py) \
	$(addprefix train/checkpoint/test_, validation.py run_folder.py) \
	$(addprefix train/minibatch/test_, run.py links.py hetero.py accesses.py evaluation.py multilabel.py learned_inputs.py))

# Minutes: what any change can break.
test: setup
	$(PYTEST) -m "not slow" $(addprefix --ignore=, $(REST)) $(ARGS)

# What is marked as slow tries at length what shorter tests try.
test-rest: setup
	$(PYTEST) -m "not slow" $(REST) $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

# The main job and a cross-section of the tests, in an environment of its own with the oldest or the
# newest versions that pyproject.toml allows and this Python has.
CROSS_SECTION := $(addprefix tests/, dgl data models ops report sampling test_cli.py test_doctor.py docs/test_private_names.py)
test-oldest test-newest: BIN = $(VENV)-$*/bin
test-oldest test-newest: test-%: .ci/%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c $< -e ".[dev]"
	$(BIN)/dgl-mgpu install-dgl
	$(BIN)/dgl-mgpu train trainer.epochs=1
	$(PYTEST) -m "not slow" $(CROSS_SECTION) $(ARGS)

# Needs CuPy beside what setup installs: pip install -e '.[cuda13]'. GPU_PYTHON names another
# environment to run in. Several tests may share the GPUs (with pytest-xdist,
# ARGS="-n 8 --dist loadgroup"); those that measure them come after, one by one.
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS := tests/kernels $(shell find tests -name "test_*_gpu.py" ! -path "tests/benchmarks/*") $(addprefix tests/, \
	comm/test_communicator.py store/test_calibration.py store/test_row_updates.py store/memory/test_staging.py)
# Their tests on a GPU have it in their names; the others run without one as well.
GPU_TESTS_BY_NAME := $(addprefix tests/, capture distributed layerwise_inference models train/fullgraph graph sampling \
	$(addprefix store/, $(SPAN_TESTS)) store/test_partitioned.py store/test_walks_over_machines.py faults/test_lost_machines.py \
	dgl/nn dgl/test_invalid_input.py dgl/test_padding.py dgl/test_sparse_adam.py)
test-gpu: export DGL_MGPU_REQUIRE_GPU = 1
test-gpu: export OMP_NUM_THREADS = 1
test-gpu:
	$(GPU_PYTHON) -m pytest -q -m "not alone" $(GPU_TESTS) $(ARGS)
	$(GPU_PYTHON) -m pytest -q -k "cuda or gpu" --ignore-glob="*_gpu.py" $(GPU_TESTS_BY_NAME) $(ARGS)
	$(GPU_PYTHON) -m pytest -q -m alone tests/store tests/kernels tests/faults/test_kills_gpu.py

# The kernels' tests once more under each tool of compute-sanitizer; some minutes. Its backtraces of
# the host would keep Python's frames, and with them what tests see given up.
SANITIZED := $(addprefix tests/kernels/test_, gather.py sample.py etype_blocks.py \
	sample_weighted.py walk.py walk_blocks.py negative.py scatter.py spmm.py spmm_transposed.py sddmm.py \
	edge_softmax.py spmm_remote.py transpose.py store_edges.py)
# Between ranks torch keeps its memory: NCCL reads the last words of messages whole, which is more
# than there is of some; and asks for kernels that this GPU has none of.
SANITIZED_RANKS := $(addprefix tests/distributed/exchange/test_, exchange.py remote_reads.py)
sanitize-gpu:
	for tool in memcheck racecheck initcheck synccheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 9 \
		--show-backtrace device $(GPU_PYTHON) -m pytest -q $(SANITIZED) -k cuda $(ARGS) || exit 1; done
	for tool in memcheck racecheck initcheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 9 --target-processes all \
		--show-backtrace device --report-api-errors no $(GPU_PYTHON) -m pytest -q $(SANITIZED_RANKS) \
		-k "cuda and skewed" $(ARGS) || exit 1; done

# What docs/reliability.md shows, an hour or so: make faults ARGS="--out docs/benchmarks/faults.json".
# GPU_PYTHON names an environment with CuPy, where there are GPUs.
faults: setup
	$(GPU_PYTHON) -m benchmarks.faults --long $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup
	$(BIN)/mypy

# The site of docs/, in docs/_build; warnings, dead links among them, are errors.
docs: $(VENV)/.docs-ready
	$(BIN)/python -m sphinx -W --keep-going -q -c docs $(ARGS) . docs/_build

$(VENV)/.docs-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[docs]"
	@touch $@

wheel: setup
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .

# What a release uploads: the wheel and the source, the same bits whoever builds them of a commit.
# `cmp` proves it for this machine, by a build from a copy elsewhere.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(VENV)/.release-ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	set -e; again=$$(mktemp -d); trap 'rm -rf "$$again"' EXIT; \
	git archive HEAD | tar -x -C "$$again"; \
	$(BIN)/python -m build --outdir "$$again/dist" "$$again"; \
	for file in dist/*; do cmp "$$file" "$$again/$$file"; done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

$(VENV)/.release-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[release]"
	@touch $@

# The wheel alone, in an empty environment and outside the checkout, runs the main job. Of what it
# installs it imports little, and compiles that alone to bytecode.
test-wheel: wheel
	set -e; empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT; \
	$(BIN)/python -m venv "$$empty/venv"; \
	install="$$empty/venv/bin/pip install --no-compile --quiet --disable-pip-version-check -c .ci/constraints.txt"; \
	$$install torch; $$install dist/*.whl; cd "$$empty"; \
	venv/bin/dgl-mgpu train trainer.epochs=1; \
	venv/bin/dgl-mgpu plan topology=dgx1 > /dev/null; \
	test -d venv/lib/python3.*/site-packages/dgl_mgpu/_resources/kernels

# The papers' claims; benchmarks/__main__.py says what there is to choose. On GPUs with CuPy, as the
# tests are: make bench-gpu GPU_PYTHON=...
bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu:
	$(GPU_PYTHON) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest dist build outputs docs/_build
