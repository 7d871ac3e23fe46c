"""Engine metrics in every dress and state: the same load, or honestly unknown."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import EndpointLoad
from gateway.upstream.client import HttpClient
from gateway.upstream.exposition import LARGEST_EXPOSITION, parse_exposition
from gateway.upstream.scrape import Scraper
from tests.fakes.upstream import FakeUpstream, Peer, RefusedPort, by_path, json_response, response, silent, until

METRICS = (Path(__file__).parent / "fixtures" / "metrics_vllm_0_32.txt").read_text()


def load(text: str | bytes) -> EndpointLoad:
    return parse_exposition(text, 5.0)


def test_recorded_metrics_of_vllm() -> None:
    got = load(METRICS)
    assert (got.at, got.running, got.waiting, got.preemptions) == (5.0, 8.0, 16.0, 0.0)
    assert (got.kv_block_size, got.kv_blocks) == (128, 32768)
    assert got.kv_usage == pytest.approx(0.000366, abs=1e-6)


OLD = 'vllm:num_requests_waiting{m="x"} 3\nvllm:num_requests_running{m="x"} 5\nvllm:gpu_cache_usage_perc{m="x"} 0.5\n'
NEW = OLD.replace("gpu_cache", "kv_cache")
PARALLEL = (
    'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2\n'
    'vllm:num_requests_running_total{engine="0"} 5\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
    'vllm:gpu_cache_usage_perc{engine="0"} 0.9\n'
)
SGLANG = "sglang:num_queue_reqs 3.0\nsglang:num_running_reqs 5.0\nsglang:token_usage 0.5\n"
TGI = "tgi_queue_size 3\ntgi_batch_current_size 5\n"
TRTLLM = "trtllm_num_requests_waiting 3\ntrtllm_num_requests_running 5\ntrtllm_kv_cache_utilization 0.5\n"
TRITON = (
    'nv_trt_llm_request_metrics{model="x",request_type="waiting",version="1"} 3\n'
    'nv_trt_llm_request_metrics{model="x",request_type="scheduled",version="1"} 5\n'
    'nv_trt_llm_request_metrics{model="x",request_type="max",version="1"} 99\n'
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="x"} 0.5\n'
)


@pytest.mark.parametrize(
    "text",
    [
        OLD,
        NEW,
        OLD + "vllm:kv_cache_usage_perc 0.5\n",
        PARALLEL,
        SGLANG,
        SGLANG.replace("sglang:", "sglang_"),
        TRTLLM,
        TRITON,
    ],
)
def test_every_engine_tells_the_same(text: str) -> None:
    got = load(text)
    assert (got.waiting, got.running, got.kv_usage) == (3.0, 5.0, 0.5)


def test_what_an_engine_does_not_tell_is_unknown() -> None:
    got = load(TGI)
    assert (got.waiting, got.running, got.kv_usage, got.kv_blocks) == (3.0, 5.0, None, None)


def test_the_breakdown_by_reason_is_not_the_total() -> None:
    assert load('vllm:num_requests_waiting_by_reason{reason="capacity"} 16\n').waiting is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "", "x", "Infinity"])
def test_nonsense_is_unknown_and_spoils_nothing_else(value: str) -> None:
    got = load(f"vllm:num_requests_waiting {value}\nvllm:num_requests_running 2\n")
    assert (got.waiting, got.running) == (None, 2.0)
    parallel = f'vllm:num_requests_waiting{{engine="0"}} 4\nvllm:num_requests_waiting{{engine="1"}} {value or "NaN"}\n'
    assert load(parallel).waiting is None


def test_labels_may_hold_anything() -> None:
    assert load('vllm:num_requests_waiting{a="} 9 \\" {",b="x"} 4 1700000000\n').waiting == 4.0


OTHER_BODIES = {
    "gzip": gzip.compress(METRICS.encode()),
    "html": b"<html>busy</html>",
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "huge": METRICS.encode() * 1000,
}


@pytest.mark.parametrize("body", OTHER_BODIES.values(), ids=OTHER_BODIES)
def test_other_bodies_tell_nothing(body: bytes) -> None:
    assert load(body) == EndpointLoad(at=5.0)


@given(st.binary(max_size=200), st.text(max_size=50))
def test_no_text_raises(noise: bytes, value: str) -> None:
    load(noise)
    load(f"vllm:num_requests_waiting{{{value}}} {value}\nvllm:cache_config_info{{block_size={value}}} 1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def models(*lengths: object) -> bytes:
    return json_response({"data": [{"id": "m", "max_model_len": length} for length in lengths]})


class Bench:
    """A scraper of a port, its probe results and its clock."""

    def __init__(self, port: int, interval: float = 1.0) -> None:
        self.client = HttpClient("127.0.0.1", port)
        self.clock = Clock()
        self.probes: list[bool] = []
        self.scraper = Scraper(self.client, self.clock, probed=self.probes.append, interval=interval)


def metrics(text: str | bytes, status: int = 200) -> bytes:
    return response(text if isinstance(text, bytes) else text.encode(), status, kind="text/plain")


async def test_a_look_learns_load_window_and_health() -> None:
    script = by_path({"/metrics": metrics(NEW), "/v1/models": models(8192, 4096, None)}, response())
    async with FakeUpstream(script) as engine:
        bench = Bench(engine.port)
        await bench.scraper.look()
        got = bench.scraper.load(bench.clock.now)
        assert got is not None and (got.waiting, got.at) == (3.0, 100.0)
        assert (bench.scraper.window, bench.probes) == (4096, [True])
        bench.clock.now += 10
        await bench.scraper.look()
        assert [r.target for r in engine.requests].count("/v1/models") == 1
        bench.clock.now += 30
        await bench.scraper.look()
        assert [r.target for r in engine.requests].count("/v1/models") == 2
        bench.client.close()


@pytest.mark.parametrize(
    "bad",
    [
        metrics("oops", 500),
        metrics("<html>"),
        metrics(gzip.compress(NEW.encode())),
        metrics("vllm:num_requests_waiting NaN\n"),
        b"garbage\r\n\r\n",
    ],
    ids=["500", "html", "gzip", "nan", "garbage"],
)
async def test_a_broken_scrape_keeps_the_last_good_one_with_its_time(bad: bytes) -> None:
    routes = {"/metrics": metrics(NEW)}
    async with FakeUpstream(by_path(routes, response())) as engine:
        bench = Bench(engine.port)
        await bench.scraper.look()
        routes["/metrics"] = bad
        bench.clock.now += 10
        await bench.scraper.look()
        got = bench.scraper.load(bench.clock.now)
        assert got is not None and (got.waiting, got.at) == (3.0, 100.0)
        assert bench.scraper.failures == 1 and bench.probes == [True, True]
        bench.client.close()


async def test_one_value_that_falls_silent_becomes_unknown_after_three_seconds() -> None:
    texts = iter([NEW, *["vllm:num_requests_running 6\n"] * 10])

    async def script(peer: Peer) -> None:
        while (request := await peer.request()) is not None:
            await peer.send(metrics(next(texts)) if request.target == "/metrics" else response())

    async with FakeUpstream(script) as engine:
        bench = Bench(engine.port)
        waiting = []
        for _ in range(6):
            await bench.scraper.look()
            got = bench.scraper.load(bench.clock.now)
            assert got is not None and got.at == bench.clock.now
            waiting.append(got.waiting)
            bench.clock.now += 1
        assert waiting == [3.0, 3.0, 3.0, 3.0, None, None]
        bench.client.close()


async def test_an_endless_body_is_given_up_by_its_size() -> None:
    async def script(peer: Peer) -> None:
        while (request := await peer.request()) is not None:
            if request.target != "/metrics":
                await peer.send(response())
                continue
            await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(LARGEST_EXPOSITION // 65536 + 32):
                await peer.send(b"# x\n" * 16384)
            await peer.client_left()

    async with FakeUpstream(script) as engine:
        bench = Bench(engine.port, interval=60.0)
        await asyncio.wait_for(bench.scraper.look(), 10.0)
        assert bench.probes == [True] and bench.scraper.load(100.0) is None
        await until(lambda: any(peer.gone.is_set() for peer in engine.peers))
        assert bench.client.active == 0
        bench.client.close()


async def test_a_slow_engine_is_given_up_in_time() -> None:
    async with FakeUpstream(silent) as engine:
        bench = Bench(engine.port, interval=0.1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await bench.scraper.look()
        assert loop.time() - began < 2.0
        assert bench.probes == [False] and bench.scraper.load(100.0) is None and bench.scraper.window is None
        assert bench.client.active == 0
        bench.client.close()


async def test_nobody_there() -> None:
    with RefusedPort() as nobody:
        bench = Bench(nobody.port)
        await bench.scraper.look()
        assert (bench.probes, bench.scraper.load(100.0), bench.scraper.failures) == ([False], None, 1)


@pytest.mark.parametrize(("status", "alive"), [(200, True), (404, True), (503, False)])
async def test_any_answer_but_a_5xx_is_a_sign_of_life(status: int, alive: bool) -> None:
    async with FakeUpstream(by_path({}, response(b"", status))) as engine:
        bench = Bench(engine.port)
        await bench.scraper.look()
        assert bench.probes == [alive]
        bench.client.close()
