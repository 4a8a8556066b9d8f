# Everything happens in .venv, which ci/setup makes; a second call finds it ready.
.DEFAULT_GOAL := help
.PHONY: help run test test-full lint generate clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1\t/p' Makefile | expand -t 19

run: ## the demo: SmolLM2 on this machine (ARGS="--prompt ...", see attnplat run --help)
	@ci/setup demo
	@.venv/bin/attnplat run $(ARGS)

test: ## lint, types and every test that needs no accelerator and no patience
	@ci/run

test-full: ## all tests, the slow ones too; writes a record into ci/records/
	@ci/setup demo,dev
	@.venv/bin/python ci/full_tests.py

lint: ## ruff and mypy alone
	@ci/run install lint types

generate: ## rewrite the command output in README.md, docs/ and the package
	@ci/setup demo,dev
	@.venv/bin/python ci/generated.py --write
	@.venv/bin/python ci/workflows.py --write

clean: ## remove what was built, virtual environments included
	rm -rf .venv .venv-* build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
