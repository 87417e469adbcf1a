# Everything a user or a contributor runs. Each target creates .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: docs release-check versions newest oldest demo test test-policies test-traces test-docs test-all fuzz fuzz-engines audit bench disk-check live-check gpu-check lint format clean
.DEFAULT_GOAL := demo

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "moe-expert-cache needs Python 3.11 to 3.13: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[oracle]'
	@touch $@

demo: $(READY) ## the whole loop on what ships with the project: record, sweep, replay, compare, report
	$(BIN)/moe-trace record --out demo/trace --batch-size 8 --overwrite
	$(BIN)/moe-sim sweep demo/trace --model-profile demo-stand-in --hardware demo --cache-sizes 10%,25%,50% --out demo/sweep --overwrite
	$(BIN)/moe-replay store demo/experts --model-profile demo-stand-in --overwrite
	$(BIN)/moe-replay --from demo/sweep --device disk --store demo/experts --requests 4 --out demo/replay-disk --overwrite
	$(BIN)/moe-sim report demo/sweep demo/replay-disk --out demo/report.html --overwrite
	@echo
	@echo "Open demo/report.html in a browser: what was found, with figures."
	@echo "The commands are in $(BIN): run '. $(BIN)/activate' to type moe-trace, moe-sim and moe-replay as they are."

test: $(READY) lint ## what CI runs: about 10 minutes of CPU time, 5 on two quiet cores
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-policies: $(READY) ## what a change of a policy touches
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow' tests/policies

test-traces: $(READY) ## what a change of importers, readers or writers touches
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow' tests/traces

test-docs: $(READY) ## what a change of a page touches
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow' tests/test_documents.py tests/test_contract.py tests/test_plain_words.py

test-all: $(READY) lint ## everything, also what takes long
	$(BIN)/pytest -n 2 --dist worksteal

FUZZ_SECONDS ?= 60
fuzz: $(READY) ## every reader of foreign binary files, FUZZ_SECONDS each
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

audit: $(READY) ## known vulnerabilities in what is installed: by a tool in a folder of its own
	$(PYTHON) -m venv .audit
	.audit/bin/pip install -q --disable-pip-version-check pip-audit
	.audit/bin/pip-audit --progress-spinner off --path "$$($(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib"))')"

fuzz-engines: $(READY) ## both engines against each other and the oracle on 50,000 random runs of each kind
	MOE_FUZZ_CASES=50000 $(BIN)/pytest -n 2 tests/sim/test_kernel.py tests/sim/test_drafts.py tests/sim/test_model_equals_reference.py -k seeded

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2
	$(BIN)/lint-imports

docs: $(READY) ## the documentation as a site in site/; broken links fail
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -f docs/mkdocs.yml

release-check: $(READY) ## wheel and sdist, built and installed in a clean environment; known vulnerabilities
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt build pip-audit
	PYTHON=$(PYTHON) BIN=$(BIN) .ci/release-check

# Not part of `.ci/run`, which would take twice as long: CI runs each of the two on one Python (.github/workflows/ci.yml).
versions: newest oldest
newest: RESOLUTION := highest
oldest: RESOLUTION := lowest-direct
newest oldest: ## the tests that need no torch, with the newest versions that pyproject.toml allows, or with the oldest
	$(PYTHON) -m venv .versions/uv
	.versions/uv/bin/pip install -q --disable-pip-version-check uv
	.versions/uv/bin/uv venv -q --clear --python $(PYTHON) .versions/$@
	.versions/uv/bin/uv pip install -q --python .versions/$@ --resolution $(RESOLUTION) --only-binary :all: \
		--no-binary moe-expert-cache -e '.[test]'
	.versions/$@/bin/pytest -n 2 --dist worksteal -m 'not slow' tests/traces tests/policies tests/sim tests/test_extras.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## speeds as ratios measured in one run
	$(BIN)/python -m benchmarks

disk-check: $(READY) ## prediction against measurement on this machine's disk and CPU, and what people use; 35 minutes
	$(BIN)/python -m benchmarks.checks disk $(DISK_CHECK)

live-check: $(READY) ## live generation under a limit of memory, beside its prediction, accelerate and transformers alone
	$(BIN)/python -m benchmarks.checks live $(LIVE_CHECK)

# Needs no network and nothing installed beyond what a GPU machine has (replay/README.md, "On a GPU"): no .venv is made.
gpu-check: ## on a machine with a CUDA GPU: everything that only a GPU can show, in a budget of 9 minutes
	$(PYTHON) -m benchmarks.checks gpu $(GPU_CHECK)

clean:
	rm -rf $(VENV) .audit .versions demo
