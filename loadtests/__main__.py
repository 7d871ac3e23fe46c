"""`python -m loadtests overload|overhead ...`: exit 0 good, 1 a promise broken or nothing to be seen, 2 usage."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from loadtests.client import Target, target
from loadtests.overhead import command as overhead
from loadtests.overload import Outcome, OverloadError, Plan, overload, verdict
from loadtests.report import as_json, lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="loadtests", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _overload_options(commands.add_parser("overload", help="offer a multiple of a pool's capacity and check"))
    overhead.options(commands.add_parser("overhead", help="what a call costs here, beside other gateways"))
    asked = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = asked.run
    return run(asked)


def _overload(asked: argparse.Namespace) -> int:
    plan = Plan(
        api=asked.url,
        ops=asked.ops,
        key=asked.key,
        model=asked.model,
        pool=asked.pool or asked.model,
        load=asked.load,
        seconds=asked.seconds,
        slo=asked.slo,
        capacity=asked.capacity,
        batch_key=asked.batch_key,
        batch_workers=asked.batch_workers,
        max_tokens=asked.max_tokens,
        limit=asked.limit,
        seed=asked.seed,
        warm_up=asked.warm_up,
        measured=asked.measured,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(overload(plan, _say))
    except (OverloadError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    _told(outcome, asked.json)
    return 0 if outcome.kept else 1


def _overload_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--url", type=_target, default=Target("127.0.0.1", 8000), help="the API port, on this machine")
    option("--ops", type=_target, default=Target("127.0.0.1", 8001), help="the operations port, on this machine")
    option("--key", default="tg-demo-online", help="an online tenant's key")
    option("--model", default="small")
    option("--pool", help="the pool's label in the metrics, if it is not the model")
    option("--load", type=_positive, default=3.0, help="multiple of the capacity")
    option("--seconds", type=_positive, default=30.0)
    option("--slo", type=_positive, default=2.0, help="bound of the P99 first token, s")
    option("--capacity", type=_positive, help="calls a second; measured if not given")
    option("--batch-key", help="a batch tenant's key: its calls run beside the load")
    option("--batch-workers", type=int, default=16)
    option("--max-tokens", type=int, default=100)
    option("--limit", type=_positive, default=30.0, help="a call not over after so many seconds is hung")
    option("--warm-up", type=_positive, default=3.0, help="s until rates are counted; two calls long at least")
    option("--measured", type=_positive, default=8.0, help="s that the capacity is measured")
    option("--seed", type=int, default=0)
    option("--json", type=Path, metavar="FILE", help="write the outcome there as well")
    parser.set_defaults(run=_overload)


def _target(text: str) -> Target:
    try:
        return target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _told(outcome: Outcome, file: Path | None) -> None:
    print("\n".join([*lines(outcome.online), *verdict(outcome)]))
    if file is not None:
        file.write_text(as_json(outcome) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
