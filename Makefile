# `make help` lists the targets. Everything is set up in .venv on first use.
PYTHON ?= python3
# A machine without a GPU takes PyTorch's CPU builds from another index: make train TORCH_INDEX=URL
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.gridtron-installed
.DEFAULT_GOAL := help

.PHONY: help setup train test test-all test-gpu lint types format bench-gpu peers clean

help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "gridtron runs on Python 3.11 to 3.13; $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## make .venv with everything in it

train: $(STAMP)  ## train a small GPT on the Python library's own source: two processes, four minutes
	$(BIN)/gridtron train experiment=first_run

test: $(STAMP)  ## the test suite (under ten minutes on two cores)
	$(BIN)/python -m pytest -m "not gpu and not slow" $(ARGS)

test-all: $(STAMP)  ## everything that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: $(STAMP)  ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## ruff, writing
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy over the whole tree
	@mkdir -p .types/gridtron
	@cp gridtron/*.py .types/gridtron/
	@for folder in core parallel models conf tools; do ln -sfn ../../$$folder .types/gridtron/$$folder; done
	MYPYPATH=.types $(BIN)/mypy --config-file pyproject.toml -p gridtron

bench-gpu: $(STAMP)  ## kernels and a training step on one CUDA device, under five minutes; figures in gpu.json
	$(BIN)/gridtron bench gpu out=gpu.json $(ARGS)

peers: $(STAMP)  ## what `gridtron bench` compares with, apart in .peers; no test needs them
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .peers megatron-core==0.16.1 transformers==5.24.0
	$(BIN)/python -m pip install --quiet --upgrade --target .peers -c constraints.txt huggingface-hub regex pyyaml packaging tqdm typer

clean:  ## remove .venv and what was built
	rm -rf $(VENV) .types .peers build dist *.egg-info
