"""What a good file becomes: typed, complete, and with the defaults that are documented."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from gateway.config import ConfigError, load
from gateway.config.show import redacted
from gateway.config.values import Address
from gateway.core.types import Band, Caps, Limits, Rate
from tests.config.texts import HASH_A, PRODUCT, SMALL, good


def test_the_documented_example_is_typed(tmp_path: Path) -> None:
    (tmp_path / "capacity").mkdir()
    (tmp_path / "capacity" / "small.yaml").write_text("in_flight: 96\nwaiting: 24\nprefill_rate: 9000.5\n")
    (tmp_path / "gateway.yaml").write_text(PRODUCT)
    config = load(tmp_path / "gateway.yaml", {})
    assert config.listen.api == Address("0.0.0.0", 8000)
    assert config.store.timeout == pytest.approx(0.025)
    small = config.pools["small"]
    assert (small.endpoints[0].url, small.endpoints[0].label) == ("http://10.0.0.11:8000", "10.0.0.11:8000")
    assert (small.capacity.in_flight, small.capacity.waiting) == (96, 24)
    assert small.capacity_file is not None
    assert small.capacity_file.path == tmp_path / "capacity" / "small.yaml"
    assert small.capacity_file.notes == {"prefill_rate": 9000.5}
    assert small.slo.inter_token == pytest.approx(0.06)
    assert config.pools["large"].endpoints[0].url == "http://10.0.0.13:8000"
    assert config.caps.body == 8 << 20
    assert config.queue.online.timeout == 2.0
    assert config.queue.online.limit is None
    assert config.queue.batch.limit == 10_000
    assert config.tenants["acme"].limits.requests == Rate(600, 60)
    rule = config.routes["auto"].rules[1]
    assert rule.when.prompt_tokens is not None
    assert rule.when.prompt_tokens.holds(6001)
    assert config.canary is not None
    assert config.canary.stages == (5, 10, 50, 100)


def test_a_tenant_in_the_words_of_the_core() -> None:
    text = SMALL.replace(
        "acme: {", "acme: {band: batch, weight: 2, tiers: [small], limits: {requests: 0, concurrent: 0}, "
    )
    tenant = good(text=text).tenants["acme"].as_tenant("acme")
    assert (tenant.name, tenant.band, tenant.weight, tenant.tiers) == ("acme", Band.BATCH, 2.0, frozenset({"small"}))
    assert tenant.limits == Limits(requests=Rate(0, 60), concurrent=0)
    assert tenant.caps == Caps()


def test_the_shortest_file_has_the_documented_defaults() -> None:
    config = good()
    assert str(config.listen.ops) == "127.0.0.1:8001"
    assert config.store.url == "memory"
    assert config.store.shared is False
    assert config.keepalive == 15.0
    assert config.canary is None
    assert config.tenants["acme"].tiers == ("small", "large")
    assert config.tenants["acme"].on_error == "local"
    assert config.warnings == ()


def test_a_store_may_be_its_url_only() -> None:
    assert good("store: redis://host:6379/0\n").store.url == "redis://host:6379/0"


def test_zero_is_not_unset() -> None:
    config = good(
        "keepalive: 0\nretry: {attempts: 0, budget: 0}\nqueue: {online: {timeout: 0, limit: 0}, batch: {limit: 0}}\n"
        "timeouts: {connect: 0s}\ndrain: {delay: 0}\ncanary: {share: 0}\n"
    )
    assert config.keepalive == 0
    assert (config.retry.attempts, config.retry.budget) == (0, 0)
    assert (config.queue.online.timeout, config.queue.online.limit, config.queue.batch.limit) == (0, 0, 0)
    assert config.timeouts.connect == 0
    assert config.pools["small"].timeouts.connect == 0
    assert config.drain.delay == 0
    assert config.canary is not None
    assert config.canary.share == 0


def test_nothing_written_after_a_key_is_the_default() -> None:
    config = good("keepalive:\nretry: {attempts: null, budget: ~}\nqueue:\n")
    assert config.keepalive == 15.0
    assert config.retry.attempts == 2
    assert config.queue.batch.limit == 10_000


def test_what_a_pool_or_tenant_does_not_write_comes_from_the_file() -> None:
    text = SMALL.replace("tier: small\n", "tier: small\n    timeouts: {gap: 5s}\n").replace(
        "acme: {", "acme: {caps: {max_tokens: {limit: 256}}, on_error: closed, "
    )
    config = good("timeouts: {first_token: 9s}\ncaps: {prompt_tokens: 99}\n", text=text)
    small, large = config.pools["small"].timeouts, config.pools["large"].timeouts
    assert (small.gap, small.first_token, large.gap, large.first_token) == (5.0, 9.0, 30.0, 9.0)
    caps = config.tenants["acme"].caps
    assert (caps.max_tokens.limit, caps.max_tokens.default, caps.prompt_tokens, caps.n) == (256, 256, 99, 4)
    assert config.tenants["acme"].on_error == "closed"
    assert config.caps.max_tokens.limit == 4096


def test_a_classifier_abstains_to_the_last_tier() -> None:
    config = good("routes: {auto: {default: small, classifier: {}}}\n")
    assert config.routes["auto"].classifier is not None
    assert config.routes["auto"].classifier.abstain == "large"


def test_a_capacity_that_was_not_measured_is_a_guess_and_a_warning(tmp_path: Path) -> None:
    text = SMALL.replace("capacity: {in_flight: 8, waiting: 2}\n  large", "capacity: later.yaml\n  large")
    text = text.replace("    capacity: {in_flight: 8, waiting: 2}\n", "")
    (tmp_path / "c.yaml").write_text(text)
    config = load(tmp_path / "c.yaml", {})
    for name in ("small", "large"):
        assert (config.pools[name].capacity.in_flight, config.pools[name].capacity.waiting) == (64, 16)
        assert any(f"pools.{name}.capacity" in told and "measure it" in told for told in config.warnings)
    assert config.pools["small"].capacity_file is not None
    assert config.pools["large"].capacity_file is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("in_flight: true\n", "in_flight"),
        ("waiting: 3\n", "is missing"),
        ("{", "not YAML"),
        ("", "empty"),
        ("- 1\n", "mapping"),
    ],
)
def test_a_broken_capacity_file_is_named(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "small.yaml").write_text(content)
    (tmp_path / "c.yaml").write_text(
        SMALL.replace("capacity: {in_flight: 8, waiting: 2}\n  large", "capacity: small.yaml\n  large")
    )
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "c.yaml", {})
    (mistake,) = refused.value.mistakes
    assert (mistake.path, mistake.line) == ("pools.small.capacity", 7)
    assert "small.yaml" in mistake.message
    assert told in mistake.message


def test_a_file_that_is_not_there_or_no_text_is_a_mistake_too(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"tiers: [small]\nlog: {file: \xff}\n")
    for name, line in (("none.yaml", 1), ("latin.yaml", 2)):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path / name, {})
        assert refused.value.mistakes[0].line == line


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError):
        good().retry.attempts = 5  # type: ignore[misc]


def test_what_is_shown_has_no_secrets() -> None:
    text = SMALL.replace("model: Qwen\n", 'model: Qwen\n    api_key: "${ENGINE}"\n')
    config = good("store: redis://me:pa55word@host/0\n", {"ENGINE": "!r: #$x"}, text)
    key = config.pools["small"].api_key
    assert key is not None
    assert key.get_secret_value() == "!r: #$x"
    shown = str(redacted(config))
    assert "pa55word" not in shown
    assert "!r" not in shown
    assert HASH_A not in shown
    assert redacted(config)["store"]["url"] == "redis://me:***@host/0"
    assert redacted(config)["tenants"]["acme"]["band"] == "online"
