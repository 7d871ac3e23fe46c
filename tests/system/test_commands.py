"""The commands: what they print, and the code they leave with (0 good, 1 bad, 2 usage)."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.api.auth import key_hash
from tests.fakes.client import chat, eventually, get, post
from tests.fakes.process import START, process, run

GOOD: dict[str, Any] = {
    "listen": {"api": "127.0.0.1:0", "ops": "127.0.0.1:0"},
    "tiers": ["small", "large"],
    "pools": {
        tier: {
            "tier": tier,
            "model": f"m-{tier}",
            "endpoints": [{"url": "http://127.0.0.1:9"}],
            "capacity": {"in_flight": 8, "waiting": 2},
            "window": 4096,
        }
        for tier in ("small", "large")
    },
    "routes": {"auto": {"default": "small", "classifier": {}}},
    "tenants": {
        "acme": {"keys": [key_hash("key-acme")], "limits": {"tokens": "9000/min"}},
        "intern": {"keys": [key_hash("key-intern")], "tiers": ["small"]},
    },
    "admin": {"keys": [key_hash("key-admin")]},
}


def written(folder: Path, **changes: Any) -> str:
    """A configuration file; its path."""
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **changes}))
    return str(file)


def asked(folder: Path, body: Any) -> str:
    file = folder / "request.json"
    file.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    return str(file)


async def test_check_likes_a_good_file(tmp_path: Path) -> None:
    done = await run("check", written(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert "good (2 pools, 1 routes, 2 tenants)" in done.out


async def test_check_and_serve_show_every_mistake_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(GOOD) + "keepalve: 3s\n" + "retry: {attempts: yes}\n" + "caps: {prompt_tokens: 0}\n")
    for command in ("check", "serve"):
        done = await run(command, str(file))
        assert done.code == 1
        for told in ("keepalve", "keepalive", "retry.attempts", "caps.prompt_tokens"):
            assert told in done.err
        lines = file.read_text().splitlines()
        assert f"{lines.index('keepalve: 3s') + 1}" in done.err
        assert "Traceback" not in done.err + done.out


@pytest.mark.parametrize("command", ["check", "serve"])
async def test_a_file_that_is_not_there(tmp_path: Path, command: str) -> None:
    done = await run(command, str(tmp_path / "nowhere.yaml"))
    assert done.code == 1
    assert "nowhere.yaml" in done.err
    assert "Traceback" not in done.err


async def test_several_workers_need_redis(tmp_path: Path) -> None:
    done = await run("serve", written(tmp_path), "--workers", "2")
    assert done.code == 2
    assert "Redis" in done.err
    assert "--workers 2" in done.err


@pytest.mark.parametrize("which", ["api", "ops"])
async def test_a_port_in_use(tmp_path: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = await run("serve", written(tmp_path, listen={**GOOD["listen"], which: address}))
        assert done.code == 1
        assert address in done.err
        assert f"listen.{which}" in done.err
        assert "Traceback" not in done.err


async def test_demo_and_sim_on_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (("demo", "--port", port, "--ops-port", "0"), ("sim", "--port", port, "--model", "m")):
            done = await run(*command)
            assert done.code == 1
            assert port in done.err
            assert "Traceback" not in done.err


async def test_a_profile_that_cannot_be_used(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nt0: quick\n")
    for profile in ("nosuch", str(bad)):
        done = await run("sim", "--port", "0", "--model", "m", "--profile", profile)
        assert done.code == 2
        assert profile in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [("serve",), ("sim", "--model", "m"), ("nosuch",), ("check", "a", "b")])
async def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = await run(*arguments)
    assert done.code == 2
    assert "Usage" in done.err


async def test_explain_tells_what_would_be_decided(tmp_path: Path) -> None:
    body = chat("Translate to French: good morning", model="auto", max_tokens=100_000)
    done = await run("explain", written(tmp_path), asked(tmp_path, body), "--key", "key-acme", "--json")
    assert done.code == 0, done
    told = json.loads(done.out)
    assert (told["tenant"], told["tier"], told["pool"], told["engine model"]) == ("acme", "small", "small", "m-small")
    assert told["why"].startswith("classifier:")
    assert told["clamped"] == f"max_tokens={told['max_tokens']}"
    assert told["prompt tokens"] + told["max_tokens"] == told["quota held"] <= 4096
    assert told["token limit"] == 9000
    assert "marzipan" not in done.out


async def test_explain_in_plain_text_names_the_same(tmp_path: Path) -> None:
    done = await run("explain", written(tmp_path), asked(tmp_path, chat("Hello", model="large", max_tokens=7)))
    assert done.code == 0
    assert re.search(r"tier: large\b", done.out)
    assert re.search(r"why: pinned\b", done.out)
    assert re.search(r"max_tokens: 7\b", done.out)


@pytest.mark.parametrize(
    ("body", "key", "code"),
    [
        (chat(model="large"), "key-intern", "tier_forbidden"),
        (chat(model="auto"), "nobody", "unauthenticated"),
        (chat("word " * 30_000, model="auto"), "key-acme", "prompt_too_long"),
        (b"{", "key-acme", "malformed"),
    ],
)
async def test_explain_tells_why_not(tmp_path: Path, body: Any, key: str, code: str) -> None:
    done = await run("explain", written(tmp_path), asked(tmp_path, body), "--key", key, "--json")
    assert done.code == 1
    assert json.loads(done.out)["refused"] == code
    assert "Traceback" not in done.err


async def test_a_new_key_is_shown_with_the_hash_to_store() -> None:
    first, second = await run("keys", "new", "acme"), await run("keys", "new", "acme")
    assert first.code == 0
    key = re.search(r"(tg-[\w-]{40,})", first.out)
    stored = re.search(r"sha256:[0-9a-f]{64}", first.out)
    assert key and stored
    assert key_hash(key[1]) == stored[0]
    assert "tenants.acme.keys" in first.out
    assert key[1] not in second.out


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
async def test_a_gateway_started_with_standard_streams_closed(tmp_path: Path, closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = written(tmp_path, listen={**GOOD["listen"], "api": f"127.0.0.1:{port}"}, drain={"delay": "0s"})
    async with process("serve", file, closed=closed) as served:

        async def lives() -> bool:
            assert served.process.returncode is None, served.err
            try:
                return (await get(port, "/livez")).status == 200
            except OSError:
                return False

        await eventually(lives, START)
        assert (await post(port, chat(model="small"), key="key-acme")).status == 503  # nobody listens on port 9
        served.signal(signal.SIGTERM)
        assert await served.ended() == 0
    assert "Traceback" not in "".join(served.err + served.out)
    if ">&-" not in closed.split():
        assert any('"event":"call"' in line for line in served.out)


async def test_version_and_help() -> None:
    assert re.fullmatch(r"tiergate \d+\.\d+\.\d+\S*", (await run("version")).out.strip())
    told = await run("--help")
    assert told.code == 0
    for command in ("serve", "demo", "sim", "check", "explain", "keys"):
        assert command in told.out
