# Every command of this repository. `make help` lists them; none needs anything but make, python3 and git to be there.

PYTHON    ?= python3
PG_CONFIG ?= pg_config

# $$PPID is this make: what it starts ends when it does, however it ends.
SUITE   = @exec $(PYTHON) tests/run.py --parent $$PPID
SERVERS = $(PYTHON) tests/servers.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint pgtap isolation matrix mutants bench up down env build install provision lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: provision ## a little shop, a relay and a consumer on servers of their own, step by step
	@exec $(SERVERS) run --parent $$PPID -- .venv/bin/python tests/demo.py

test: ## the whole suite on servers of its own
	$(SUITE)

test-long: ## the same, and every fault, repeated, on both kinds of queue; a million messages
	@exec env OUTBOX_LONG=1 $(PYTHON) tests/run.py --parent $$PPID

lint: ## ruff, mypy, pgspot, plpgsql_check and the house rules
	$(SUITE) lint

pgtap: ## the SQL tests, in both modes of installation
	$(SUITE) pgtap

isolation: ## the two-session specs
	$(SUITE) isolation

matrix: provision ## the suites that depend on the server on PostgreSQL 14 to 18: ON="14 18"
	@exec .venv/bin/python tests/matrix/run.py --parent $$PPID $(ON)

mutants: provision ## break every guard of the SQL in turn, and see a test fail each time
	@exec .venv/bin/python tests/mutants/run.py --parent $$PPID

bench: provision ## ratios against what one would use instead: ONLY=emit,claim QUICK=1
	@exec .venv/bin/python tests/bench/run.py --parent $$PPID $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

up: provision ## keep private servers running for development
	@exec $(SERVERS) up

down: ## stop them
	@exec $(SERVERS) down

env: ## print the settings that connect a shell to them: eval "$(make -s env)"
	@exec $(SERVERS) env

build: ## write the extension script and the psql scripts to build/
	@$(PYTHON) sql/packaging/build.py

install: ## put the extension where pg_config says
	@DESTDIR='$(DESTDIR)' $(PYTHON) sql/packaging/build.py install --pg-config '$(PG_CONFIG)'

provision: ## install the packages and the virtual environment that the other targets need
	@$(PYTHON) tests/provision.py

lock: ## renew python/requirements.lock
	@$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet uv
	@build/uv/bin/uv pip compile --quiet --universal --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' --all-extras --group python/pyproject.toml:dev --output-file python/requirements.lock python/pyproject.toml

clean: down ## remove what the other targets made in this clone
	rm -rf build .venv .servers
