# One environment for all: the runtime needs the first stamp, checks and tests the second.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
NPM_CLIENT := tests/e2e/clients/npm

.PHONY: run test check format model soak clean FORCE

run: $(VENV)/.runtime
	$(BIN)/pdserve up $(ARGS)

# The demo model must be in the cache: tests that need it fail without it, they are not skipped.
test: $(VENV)/.dev $(NPM_CLIENT)/node_modules/.installed model
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# 1,000 requests with clients that leave and prefill nodes that are killed; the tests run a tenth of it.
soak: $(VENV)/.dev
	SOAK_REQUESTS=1000 $(BIN)/pytest tests/soak -s

# bench-transfer-overlap, bench-early-admission, bench-digest-cost, bench-structured-output: two ways compared in one run.
bench-%: $(VENV)/.dev FORCE
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

model: $(VENV)/.runtime
	$(BIN)/pdserve model fetch smollm2-135m

$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install --quiet --editable '.[dev,clients]'
	touch $@

$(NPM_CLIENT)/node_modules/.installed: $(NPM_CLIENT)/package-lock.json
	npm ci --prefix $(NPM_CLIENT) --no-audit --no-fund
	touch $@

clean:
	rm -rf $(VENV) $(NPM_CLIENT)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
