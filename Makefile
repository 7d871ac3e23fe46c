# Each target makes the virtual environment itself, from requirements.lock, the first time it is needed.
.PHONY: demo test check clean

demo:
	@scripts/setup
	@.venv/bin/tiergate demo

test:
	@scripts/test

check:
	@scripts/check

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
