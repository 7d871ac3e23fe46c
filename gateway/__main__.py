"""Lets `python -m gateway` do what the `tiergate` command does."""

from gateway.cli import main

if __name__ == "__main__":
    main()
