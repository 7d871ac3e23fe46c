"""The commands and their options; each does its work in a module of its own. Exit codes: 0 good, 1 bad, 2 usage."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from gateway import __version__
from gateway.api.auth import key_hash
from gateway.cli import check as checking
from gateway.cli import demo as demonstration
from gateway.cli import explain as explaining
from gateway.cli import serve as serving
from gateway.cli.streams import fill_standard_streams

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file (YAML).")]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="An OpenAI-compatible gateway in front of vLLM pools."
)
keys = typer.Typer(add_completion=False, no_args_is_help=True, help="API keys.")
app.add_typer(keys, name="keys")


@app.command()
def serve(
    config: ConfigFile,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more than one needs a Redis store (not yet).")] = 1,
) -> None:
    """Run the gateway."""
    raise typer.Exit(serving.serve(config, workers))


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="API port; 0 lets the system choose.")] = 8000,
    ops_port: Annotated[int, typer.Option(help="Ops port: metrics and live state.")] = 8001,
    traffic: Annotated[bool, typer.Option(help="Send a little traffic of its own.")] = True,
) -> None:
    """Run a gateway with simulated 7B and 70B pools: no Redis, no GPU."""
    raise typer.Exit(demonstration.demo(port, ops_port, traffic))


@app.command()
def sim(
    port: Annotated[int, typer.Option(help="Port; 0 lets the system choose.")],
    model: Annotated[str, typer.Option(help="The model name it serves.")],
    profile: Annotated[str, typer.Option(help="A shipped profile (7b, 70b, fast, ...) or a YAML file.")] = "7b",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End when standard input closes.")] = False,
) -> None:
    """Run one simulated vLLM engine (OpenAI API and /metrics)."""
    raise typer.Exit(serving.simulate(host, port, model, profile, with_parent))


@app.command()
def check(config: ConfigFile) -> None:
    """Show every mistake of a configuration at once, each with its path and line."""
    raise typer.Exit(checking.check(config))


@app.command()
def explain(
    config: ConfigFile,
    request: Annotated[Path, typer.Argument(metavar="REQUEST.json", help="A request body.")],
    key: Annotated[str | None, typer.Option(help="The API key it would come with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine output.")] = False,
) -> None:
    """Show what would be decided about a request: caps, tier and why, tokens, quota. Nothing is sent."""
    raise typer.Exit(explaining.explain(config, request, key, as_json))


@keys.command("new")
def keys_new(
    tenant: Annotated[str, typer.Argument(help="The tenant the key is for; admin: for the ops port.")],
) -> None:
    """Make an API key: shown once, with the hash to store in the configuration."""
    if not _NAME.fullmatch(tenant):
        raise typer.BadParameter("a tenant's name is 1 to 64 of A-Z a-z 0-9 . _ -", param_hint="TENANT")
    key = f"tg-{secrets.token_urlsafe(32)}"
    place = "admin.keys" if tenant == "admin" else f"tenants.{tenant}.keys"
    typer.echo(f"key for {tenant} (shown only now, give it to the caller): {key}")
    typer.echo(f"hash to store under {place}: {key_hash(key)}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"tiergate {__version__}")


def main() -> None:
    """Entry point of the command."""
    fill_standard_streams()
    app(prog_name="tiergate")
