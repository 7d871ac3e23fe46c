"""`python -m loadtests overhead`: options, table and JSON of the comparison with peers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import uvloop

from loadtests.overhead.bench import overhead
from loadtests.overhead.figures import as_json, table
from loadtests.overhead.launch import BenchError
from loadtests.overhead.plan import ALL_PEERS, Plan, chosen, full, quick


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    option = parser.add_argument
    option("--quick", action="store_true", help="under a minute: short windows, nginx and vllm-router only")
    option("--peers", type=_peers, default=(), metavar="A,B", help=f"some of {','.join(ALL_PEERS)}")
    option("--json", type=Path, metavar="FILE", help="write the figures there as well")
    option("--seconds", type=float, help="length of each measured window")
    parser.set_defaults(run=run)


def plan(asked: argparse.Namespace) -> Plan:
    """What the options ask for. Raises ValueError."""
    kind = quick if asked.quick else full
    return kind(asked.peers) if asked.seconds is None else kind(asked.peers, asked.seconds)


def run(asked: argparse.Namespace) -> int:
    """Measure and tell; 0, 1 if Tiergate cannot be measured, 2 for options that make no sense."""
    try:
        planned = plan(asked)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    before = os.getloadavg()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(overhead(planned, _say))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 1  # ended by a signal; the servers are gone by now
    print("\n".join(table(results)))
    print(
        f"medians of {planned.rounds} rounds of {planned.seconds:g} s; saturation: {planned.connections} connections; "
        f"chunks: {planned.streams} streams x {planned.rate}/s; latency at {planned.slow_rate:g}/s; "
        f"load average before {before[0]:.2f}, after {os.getloadavg()[0]:.2f}"
    )
    if asked.json is not None:
        asked.json.write_text(as_json(results) + "\n", encoding="utf-8")
    return 0


def _peers(text: str) -> tuple[str, ...]:
    try:
        return chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
