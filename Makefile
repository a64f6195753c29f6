# Each target installs what it needs into .venv. The machine needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
DOCS_INSTALLED := $(VENV)/.installed-docs
AUDIT_INSTALLED := $(VENV)/.installed-audit
KERNELS_INSTALLED := $(VENV)/.installed-kernels
CLIENTS := .venv-clients
PIP_INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

# No target needs the Hub, except for a model on the Hub: a --source of a quickstart, a --model of the demo.
export HF_HUB_OFFLINE ?= $(if $(or $(findstring --source,$(ARGS)),$(findstring --model,$(ARGS))),0,1)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install quickstart quickstart-text quickstart-pixels demo docs test test-all coverage kernels gpu clients
.PHONY: conformance soak audit newest release lint format clean

install: $(INSTALLED)  ## Create .venv with the package and all tools

$(INSTALLED): setup.cfg setup.py pyproject.toml constraints.txt src/aft_hf/kernels/build.py $(wildcard src/aft_hf/kernels/cpu/*.cpp src/aft_hf/kernels/cpu/*.h)
	@echo "Installs the package, PyTorch and the tools into $(VENV), and compiles the CPU kernels if there is a C++ compiler."
	@echo "1 to 4 minutes and 2 GB with PyTorch for CPUs; that for CUDA, the default of pip on Linux, adds several GB."
	$(PYTHON) -m venv $(VENV)
# The kernels, which need only a compiler, are compiled while pip downloads.
	$(PYTHON) src/aft_hf/kernels/build.py & AFT_HF_COMPILE=0 $(PIP_INSTALL) ".[dev]"; status=$$?; wait; exit $$status
	touch $@

$(DEMO_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) ".[demo]"
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) ".[docs]"
	touch $@

$(AUDIT_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) ".[audit]"
	touch $@

# PyTorch for CUDA depends on Triton. With PyTorch for CPUs, Triton can only interpret and compile the kernels.
$(KERNELS_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) ".[kernels]"
	touch $@

quickstart: install  ## Train a ViT on digits, convert it to AFT-conv and fine-tune it: outputs/quickstart
	$(RUN) scripts/quickstart.py image $(ARGS)

quickstart-text: install  ## Train a byte-level language model on Python's documentation: outputs/quickstart-text
	$(RUN) scripts/quickstart.py text $(ARGS)

quickstart-pixels: install  ## Train a model that completes handwritten digits by sub-pixels: outputs/quickstart-pixels
	$(RUN) scripts/quickstart.py pixels $(ARGS)

demo: $(DEMO_INSTALLED)  ## Run spaces/demo in a browser, on the models in model_cards; another one: ARGS="--model PATH"
	$(RUN) spaces/demo/app.py $(ARGS)

docs: $(DOCS_INSTALLED)  ## Build the documentation site and check its links: outputs/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build $(ARGS)

# One thread per worker (tests/conftest.py); more than 8 workers cost much memory and save little time.
PYTEST := $(RUN) -m pytest -n logical --maxprocesses 8 --dist worksteal

test: install  ## Run all tests except the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

test-all: install  ## Run all tests
	$(PYTEST) $(ARGS)

coverage: $(KERNELS_INSTALLED)  ## Run the tests of make test with line coverage, which must be at least 90 %
	$(PYTEST) -m "not slow" --cov --cov-report=term-missing $(ARGS)

kernels: $(KERNELS_INSTALLED)  ## Compile every variant of the Triton kernels for GPUs: registers, spills, shared memory
	$(RUN) scripts/compile_kernels.py $(ARGS)

gpu: $(KERNELS_INSTALLED)  ## Test, tune and measure the kernels on a GPU, in about 10 minutes: outputs/gpu
	env -u TRITON_INTERPRET $(RUN) -m scripts.gpu $(ARGS)

$(CLIENTS)/.installed: setup.cfg constraints.txt tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--constraint tests/clients/constraints.txt --requirement tests/clients/requirements.txt --editable ".[test]"
	touch $@

clients: $(CLIENTS)/.installed  ## Test AFT in TRL, lm-evaluation-harness, peft, ONNX and others, and the examples of docs/integrations.md and docs/serving.md
	$(CLIENTS)/bin/python -m pytest tests/clients tests/exporting $(ARGS)

conformance: install  ## Run the common model tests of transformers on every type: docs/conformance.md
	$(RUN) tests/conformance/fetch.py
	$(PYTEST) -W ignore::pytest.PytestUnknownMarkWarning tests/conformance/test_conformance.py $(ARGS)

soak: install  ## Run the tests that take hours: training runs killed 20 times at random moments, thousands of examples of each property
	KILL_SEED=$$($(RUN) -c "import random; print(random.randrange(10**6))") \
		$(RUN) -m pytest -o python_files="soak_*.py" tests/soak $(ARGS)
	HYPOTHESIS_PROFILE=soak $(RUN) -m pytest tests/properties $(ARGS)

audit: $(AUDIT_INSTALLED)  ## Check for unsafe code, vulnerable dependencies and reproducible builds, and test the wheel in a new environment
	$(RUN) tests/audit/audit.py $(ARGS)

# Also a release that setup.cfg does not allow yet. The tests of the sums are left out: they only call torch.
NEWEST := outputs/newest
newest:  ## Run version-dependent tests and conformance on the newest torch and transformers of the package index: outputs/newest
	$(PYTHON) -m venv $(NEWEST)
	grep -vE '^(torch|triton|transformers)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt --editable ".[test]"
	$(NEWEST)/bin/pip install --quiet --upgrade transformers
	$(NEWEST)/bin/aft-hf --version
	$(NEWEST)/bin/python tests/conformance/fetch.py
	$(NEWEST)/bin/python -m pytest -W ignore::pytest.PytestUnknownMarkWarning tests/conformance/test_conformance.py
	$(NEWEST)/bin/python -m pytest -m "not slow" tests/configs tests/conversion tests/publishing tests/running \
		tests/training tests/tuning tests/test_caching_aft.py tests/test_cli.py tests/test_compile_and_export.py tests/test_configuration_aft.py \
		tests/test_modeling_aft.py tests/test_payloads.py tests/test_static_cache_aft.py tests/kernels/test_triton*.py $(ARGS)
	cd $$(mktemp -d) && $(CURDIR)/$(NEWEST)/bin/python $(CURDIR)/tests/audit/smoke.py

release: $(AUDIT_INSTALLED) lint test audit  ## Run all checks, then build wheel and sdist of a clean tree in dist/; uploads nothing
	git diff --quiet HEAD || { echo "the tree has changes that are not committed"; exit 1; }
	$(RUN) scripts/build.py dist
	@version=$$($(RUN) -c "import aft_hf; print(aft_hf.__version__)"); \
		grep -q "## $$version" CHANGELOG.md || { echo "CHANGELOG.md has no section $$version"; exit 1; }; \
		echo "to publish: git tag v$$version && git push --tags && twine upload dist/*"

# The rules of transformers for model files that cannot apply outside of its repository:
# - TRF028 asks for the licence header of its authors; the licence is in LICENSE.
# - TRF057 asks for auto_docstring, which reads documentation from the directories of its own models.
MLINTER_RULES := $(VENV)/mlinter.toml

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	sed '/^\[rules\.\(TRF028\|TRF057\)]/,/^$$/s/^default_enabled = true/default_enabled = false/' \
		$$($(RUN) -c "import mlinter; print(mlinter.__path__[0])")/rules.toml > $(MLINTER_RULES)
	$(VENV)/bin/mlinter --no-progress --no-cache --rules-toml $(MLINTER_RULES) \
		src/aft_hf/modeling_aft.py src/aft_hf/configuration_aft.py

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) .conformance outputs build dist src/*.egg-info
