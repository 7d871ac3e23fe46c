"""What is measured, and how each is started as a plain proxy with one upstream on loopback."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import loadtests
from loadtests.overhead.install import Installer
from loadtests.overhead.launch import Launch
from loadtests.overhead.source import CHAT, HEALTH, METRICS, MODEL, MODELS

KEY = "sk-bench-0123456789abcdef0123456789abcdef"
_ROOT = Path(loadtests.__file__).parents[1]

# Versions are fixed, so that figures of different days are figures of the same programs.
_VLLM_ROUTER, _SMG, _SGLANG_ROUTER = "vllm-router==0.1.17", "smg==1.13.0", "sglang-router==0.3.2"
_LITELLM, _PORTKEY = "litellm[proxy]==1.106.12", "@portkey-ai/gateway@1.15.2"

_TIERGATE = """
listen: {{api: "127.0.0.1:{listen}", ops: "127.0.0.1:{spare}", server: {face}}}
store: memory
tiers: [only]
pools:
  only:
    tier: only
    model: {model}
    endpoints: [{{url: "http://127.0.0.1:{upstream}"}}]
    capacity: {{in_flight: 4096, waiting: 1024}}
drain: {{delay: 0s, timeout: 1s}}
tenants:
  bench: {{keys: ["sha256:{key}"]}}
"""

_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000000;
  tcp_nodelay on;
{rest}
}}
"""

_NGINX_PROXY = """
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{listen} backlog=2048;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
"""

_NGINX_ENGINE = """
  server {{
    listen 127.0.0.1:{listen} backlog=2048;
    default_type application/json;
    location = /v1/chat/completions {{ return 200 '{chat}'; }}
    location = /v1/models {{ return 200 '{models}'; }}
    location = /metrics {{ default_type text/plain; return 200 '{metrics}'; }}
    location / {{ return 200 '{health}'; }}
  }}
"""

_LITELLM_CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
"""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a subject listens, its upstream, and one more for whatever else it opens."""

    listen: int
    upstream: int
    spare: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A gateway; `launch` is given its ports and an empty folder for its files."""

    name: str
    launch: Callable[[Ports, Path], Launch]


def tiergate(name: str, face: str) -> Subject:
    """This gateway, with one of its two server faces."""
    return Subject(name, lambda ports, folder: _own("serve", tiergate_config(ports, folder, face)))


def tiergate_config(ports: Ports, folder: Path, face: str) -> Path:
    """Write the configuration of a plain proxy; its path."""
    file = folder / "tiergate.yaml"
    key = hashlib.sha256(KEY.encode()).hexdigest()
    fields = {"listen": ports.listen, "spare": ports.spare, "upstream": ports.upstream}
    file.write_text(_TIERGATE.format(face=face, model=MODEL, key=key, **fields), encoding="utf-8")
    return file


def tiergate_check(file: Path) -> Launch:
    """The command that says whether a configuration can be served."""
    return _own("check", file)


def _own(command: str, file: Path) -> Launch:
    return Launch((sys.executable, "-m", "gateway", command, str(file)), _ROOT)


def source(port: int) -> Launch:
    """The upstream of streams."""
    return Launch((sys.executable, "-m", "loadtests.overhead.source", "--port", str(port)), _ROOT)


def nginx_engine(program: Path, port: int, folder: Path) -> Launch:
    """The upstream of plain calls: canned answers at C speed."""
    rest = _NGINX_ENGINE.format(
        listen=port, chat=CHAT.decode(), models=MODELS.decode(), metrics=METRICS.decode(), health=HEALTH.decode()
    )
    return _nginx(program, folder, rest)


def _nginx(program: Path, folder: Path, rest: str) -> Launch:
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, rest=rest), encoding="utf-8")
    return Launch((str(program), "-p", str(folder), "-c", str(file), "-e", "stderr"), folder)


async def nginx(installer: Installer) -> Subject:
    """One worker, kept connections, no buffering."""
    program = await installer.nginx()

    def launch(ports: Ports, folder: Path) -> Launch:
        return _nginx(program, folder, _NGINX_PROXY.format(listen=ports.listen, upstream=ports.upstream))

    return Subject("nginx", launch)


async def vllm_router(installer: Installer) -> Subject:
    """Rust, from the vLLM project."""
    program = await installer.python(_VLLM_ROUTER, "vllm-router")
    return Subject("vllm-router", lambda ports, folder: _routing((str(program),), ports, folder, "warning"))


async def sglang_router(installer: Installer) -> Subject:
    """Rust, from the SGLang project."""
    program = await installer.python(_SGLANG_ROUTER, "sglang-router")
    return Subject("sglang-router", lambda ports, folder: _routing((str(program), "launch"), ports, folder, "warn"))


async def smg(installer: Installer) -> Subject:
    """Rust, the successor of sglang-router."""
    program = await installer.python(_SMG, "smg")
    more = ("--backend", "vllm", "--disable-tokenizer-autoload")
    return Subject("smg", lambda ports, folder: _routing((str(program), "launch"), ports, folder, "warn", *more))


def _routing(program: tuple[str, ...], ports: Ports, folder: Path, level: str, *more: str) -> Launch:
    where = ("--host", "127.0.0.1", "--port", str(ports.listen), "--prometheus-port", str(ports.spare))
    worker = ("--worker-urls", f"http://127.0.0.1:{ports.upstream}", "--policy", "round_robin")
    return Launch((*program, *where, *worker, "--log-level", level, *more), folder)


async def litellm(installer: Installer) -> Subject:
    """The usual Python proxy, one worker."""
    program = await installer.python(_LITELLM, "litellm")

    def launch(ports: Ports, folder: Path) -> Launch:
        file = folder / "litellm.yaml"
        file.write_text(_LITELLM_CONFIG.format(model=MODEL, upstream=ports.upstream, key=KEY), encoding="utf-8")
        where = ("--host", "127.0.0.1", "--port", str(ports.listen), "--num_workers", "1")
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
        return Launch((str(program), "--config", str(file), *where), folder, env)

    return Subject("litellm", launch)


async def portkey(installer: Installer) -> Subject:
    """The Node gateway; it takes its upstream from the request."""
    place = await installer.node(_PORTKEY, "portkey")
    server = place / "node_modules/@portkey-ai/gateway/build/start-server.js"

    def launch(ports: Ports, folder: Path) -> Launch:
        upstream = f"http://127.0.0.1:{ports.upstream}/v1"
        headers = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", upstream))
        argv = ("node", str(server), f"--port={ports.listen}", "--headless")
        return Launch(argv, folder, {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"}, headers)

    return Subject("portkey", launch)


def peer(name: str) -> Callable[[Installer], Awaitable[Subject]]:
    """How to come by a peer; KeyError if there is none of that name."""
    known = {
        "nginx": nginx,
        "vllm-router": vllm_router,
        "smg": smg,
        "sglang-router": sglang_router,
        "litellm": litellm,
        "portkey": portkey,
    }
    return known[name]
