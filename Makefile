# Everything below sets itself up: Python >= 3.10 and make are all a machine needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# The tests, the quickstart and CI need no Hub.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install quickstart quickstart-text test lint format clean

install: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

quickstart: install  ## A ViT on real digits, converted to AFT-conv and fine-tuned: outputs/quickstart
	$(RUN) scripts/quickstart.py image $(ARGS)

quickstart-text: install  ## A byte-level AFT language model on Python's own documentation: outputs/quickstart-text
	$(RUN) scripts/quickstart.py text $(ARGS)

test: install
	$(RUN) -m pytest $(ARGS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) outputs build dist src/*.egg-info
