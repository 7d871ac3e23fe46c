"""What a bad file is told: every mistake at once, with path, line and the fix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ConfigError, loads
from gateway.config.mistakes import dotted
from tests.config.texts import HASH_A, HASH_B, PRODUCT, SMALL, good, mistakes, only


def changed(before: str, after: str, text: str = SMALL) -> str:
    assert before in text
    return text.replace(before, after, 1)


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    mistake = only(changed("acme: {", "acme: {limits: {concurent: 8}, "))
    assert (mistake.path, mistake.line) == ("tenants.acme.limits.concurent", 14)
    assert "did you mean concurrent" in mistake.message


def test_a_block_under_the_wrong_parent_is_told_where_it_belongs() -> None:
    mistake = only(SMALL + "limits: {requests: 1/s}\n")
    assert (mistake.path, mistake.line) == ("limits", 16)
    assert "belongs under tenants.<name>" in mistake.message


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        (f'  acme: {{keys: ["{HASH_A}"]}}\n', "tenants.acme"),
        ("  other: {keys: [" + HASH_B[:-1] + "c], weight: 1, weight: 2}\n", "tenants.other.weight"),
    ],
)
def test_a_duplicate_key_names_both_lines(extra: str, path: str) -> None:
    text = changed("admin:", extra + "admin:")
    mistake = only(text)
    assert mistake.path == path
    first = 14 if path == "tenants.acme" else 15
    assert f"lines {first} and 15" in mistake.message


@pytest.mark.parametrize(
    ("text", "path", "told"),
    [
        (SMALL + "queue: {online: {limit: true}}\n", "queue.online.limit", "true (true/false)"),
        (SMALL + "retry: {attempts: true}\n", "retry.attempts", "true (true/false)"),
        (SMALL + "queue: {online: {timeout: off}}\n", "queue.online.timeout", "'off'"),
        (SMALL + "queue: {online: {timeout: false}}\n", "queue.online.timeout", "false (true/false)"),
        (SMALL + "caps: {max_tokens: {limit: 4_096}}\n", "caps.max_tokens.limit", "'4_096'"),
        (SMALL + "caps: {max_tokens: {limit: 1e3}}\n", "caps.max_tokens.limit", "'1e3'"),
        (SMALL + "caps: {n: 012}\n", "caps.n", "'012'"),
        (SMALL + "caps: {n: 0x4}\n", "caps.n", "'0x4'"),
        (SMALL + "caps: {n: 4.0}\n", "caps.n", "4.0 (a number)"),
        (SMALL + 'caps: {n: "4"}\n', "caps.n", "'4' (text)"),
        (SMALL + "keepalive: 1:30\n", "keepalive", "'1:30'"),
        (SMALL + "log: {file: 2026-01-01}\n", "log.file", "'2026-01-01'"),
        (SMALL + "log: {file: no}\n", "log.file", "'no'"),
        (SMALL + "log: {level: !secret info}\n", "log.level", "!secret"),
        (changed("tiers: [", "tiers: !set ["), "tiers", "the tag !set"),
        (SMALL + 'canary: {share: "5%"}\n', "canary.share", "write 0.05"),
        (SMALL + "canary: {share: 5%}\n", "canary.share", "write 0.05"),
        (SMALL + "canary: {share: 5}\n", "canary.share", "between 0 and 1"),
        (SMALL + "canary: {share: .inf}\n", "canary.share", "'.inf'"),
        (changed("model: Qwen\n", "model: 012345\n"), "pools.small.model", "'012345'"),
        (changed("model: Qwen\n", "model: 7\n"), "pools.small.model", "7 (a number)"),
        (changed("acme:", "no:"), "tenants.no", "in quotes"),
        (changed("acme:", "123:"), "tenants.123", "in quotes"),
        (changed("acme:", '"":'), 'tenants.""', "1 to 64"),
        (changed("acme:", '"a b":'), 'tenants."a b"', "1 to 64"),
    ],
)
def test_scalars_that_are_not_what_they_look_like(text: str, path: str, told: str) -> None:
    found = mistakes(text)
    about = [mistake for mistake in found if mistake.path == path]
    assert about, [str(mistake) for mistake in found]
    assert told in about[0].message


@pytest.mark.parametrize(
    ("before", "after", "path", "told"),
    [
        ("tier: small\n", "tier: smal\n", "pools.small.tier", "did you mean small"),
        ("tiers: [small, large]", "tiers: [small, large, huge]", "tiers[2]", "no pool serves"),
        ("tiers: [small, large]", "tiers: [small, large, small]", "tiers[2]", "already at tiers[0]"),
        ("acme: {", "acme: {tiers: [smal], ", "tenants.acme.tiers[0]", "did you mean small"),
        ("admin:", "routes: {auto: {default: medium}}\nadmin:", "routes.auto.default", "tiers are small, large"),
        (
            "admin:",
            "routes: {auto: {default: small, spill: {down: [acm]}}}\nadmin:",
            "routes.auto.spill.down[0]",
            "acme?",
        ),
        (
            "admin:",
            "routes: {auto: {default: small, rules: [{name: r, when: {tools: true}, tier: x}]}}\nadmin:",
            "routes.auto.rules[0].tier",
            "is not a tier",
        ),
        (
            "admin:",
            "routes: {auto: {default: small, classifier: {abstain: larg}}}\nadmin:",
            "routes.auto.classifier.abstain",
            "did you mean large",
        ),
        (
            "admin:",
            "routes: {auto: {default: small, rules: [{name: r, when: {}, tier: small}]}}\nadmin:",
            "routes.auto.rules[0].when",
            "asks for nothing",
        ),
        ("admin:", "routes: {small: {default: small}}\nadmin:", "routes.small", "a route and a tier"),
        ("admin:", "routes: {Qwen: {default: small}}\nadmin:", "pools.small.model", "a model and a route"),
        ("model: Qwen\n", "model: large\n", "pools.small.model", "name of another tier"),
        (HASH_B, HASH_A, "admin.keys[0]", "already at tenants.acme.keys[0] (line 14)"),
        (HASH_A, "sha256:abc", "tenants.acme.keys[0]", "64 hex"),
        (HASH_A, "tg-secret-key", "tenants.acme.keys[0]", "tiergate keys new"),
        ("http://10.0.0.1:8000", "10.0.0.1:8000", "pools.small.endpoints[0].url", "http://"),
        ("http://10.0.0.1:8000", "http://10.0.0.1:99999", "pools.small.endpoints[0].url", "http://"),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000/v1", "pools.small.endpoints[0].url", "without path"),
        (
            '[{url: "http://10.0.0.1:8000"}]',
            '[{url: "http://10.0.0.1:8000"}, {url: "http://10.0.0.1:8000/"}]',
            "pools.small.endpoints[1].url",
            "already at",
        ),
        ('[{url: "http://10.0.0.1:8000"}]', "[]", "pools.small.endpoints", "must not be empty"),
        ('[{url: "http://10.0.0.1:8000"}]', "{}", "pools.small.endpoints", "must be a list"),
        ("in_flight: 8", "in_flight: 0", "pools.small.capacity.in_flight", "1 or more"),
        ("admin:", "store: reddis://x\nadmin:", "store", "redis://"),
        ("admin:", "store: {url: memory, on_error: open_}\nadmin:", "store.on_error", "did you mean open"),
        ("admin:", 'listen: {api: "h:1", ops: "h:1"}\nadmin:', "listen.ops", "same address"),
        ("admin:", "caps: {max_tokens: {default: 9, limit: 8}}\nadmin:", "caps.max_tokens", "over limit"),
        ("admin:", "canary: {stages: [5, 5]}\nadmin:", "canary", "must rise"),
        ("admin:", "queue: 5\nadmin:", "queue", "must be a mapping"),
        ("    model: Qwen\n", "", "pools.small.model", "is missing"),
        ("    model: Qwen\n", "    model:\n", "pools.small.model", "is missing"),
        ("admin:", "health: {interval: 0}\nadmin:", "health.interval", "more than 0"),
    ],
)
def test_each_mistake_has_its_place_and_its_fix(before: str, after: str, path: str, told: str) -> None:
    found = {mistake.path: mistake.message for mistake in mistakes(changed(before, after))}
    assert told in found.get(path, ""), found


def test_no_key_or_secret_is_repeated_in_a_message() -> None:
    text = changed(HASH_A, "tg-secret-key") + 'store: "${STORE}"\n'
    assert "secret" not in str(ConfigError(mistakes(text, {"STORE": "secret://x"})))


def test_every_mistake_at_once_in_the_order_of_lines() -> None:
    text = (
        changed("tier: small\n", "tier: smal\n") + "keepalive: off\nretry: {atempts: 1}\nqueue: {batch: {floor: 2}}\n"
    )
    assert [(mistake.path, mistake.line) for mistake in mistakes(text)] == [
        ("tiers[0]", 1),
        ("pools.small.tier", 4),
        ("keepalive", 16),
        ("retry.atempts", 17),
        ("queue.batch.floor", 18),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("null\n", "must be a mapping"),
        ("- a\n", "must be a mapping"),
        ("a: [1\n", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: \x00\n", "not YAML"),
        ("a: &x [*x]\n", "contains itself"),
        ("a: {<<: {b: 1}}\n", "merging"),
        ("? [a]\n: 1\n", "a key must be text"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_changes_nothing(text: str, told: str) -> None:
    assert any(told in mistake.message for mistake in mistakes(text)), [str(mistake) for mistake in mistakes(text)]


def test_half_a_file_is_refused() -> None:
    for size in range(len(SMALL.split("tenants:")[0]) + len("tenants:")):
        with pytest.raises(ConfigError):
            loads(SMALL[:size], {})


def test_aliases_cannot_multiply_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert any("repeats too much" in mistake.message for mistake in mistakes("\n".join(lines)))


@pytest.mark.parametrize("env", [{}, {"ENGINE": ""}])
def test_a_variable_must_be_set_and_not_empty(env: dict[str, str]) -> None:
    text = changed("model: Qwen\n", "model: Qwen\n    api_key: ${ENGINE}\n")
    mistake = only(text, env)
    assert (mistake.path, mistake.line) == ("pools.small.api_key", 6)
    assert f"ENGINE is {'empty' if env else 'not set'}" in mistake.message


@pytest.mark.parametrize(
    "secret", ["!r: #$x", "'", '"', "a: b", "${X}", "$$", "- x", "yes", "0123", "null", "[1", "é\u2028"]
)
@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_a_secret_is_kept_exactly(secret: str, quote: str) -> None:
    text = changed("model: Qwen\n", f"model: Qwen\n    api_key: {quote}${{ENGINE}}{quote}\n")
    key = good(text=text, env={"ENGINE": secret}).pools["small"].api_key
    assert key is not None
    assert key.get_secret_value() == secret


def test_variables_have_defaults_and_dollars_can_be_written() -> None:
    config = good(
        "log: {file: '$${HOME}/${DIR:-logs}/$$x'}\nretry: {attempts: '${TRIES:-3}'}\nkeepalive: ${KEEP:-5s}\n"
    )
    assert config.log.file == "${HOME}/logs/$x"
    assert config.retry.attempts == 3
    assert config.keepalive == 5.0


@pytest.mark.parametrize("written", ["$HOME", "${}", "${A-B}", "a$", "${1X}"])
def test_a_stray_dollar_is_a_mistake(written: str) -> None:
    assert "$$" in only(SMALL + f"log: {{file: '{written}'}}\n").message


def keys(node: yaml.Node, loc: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], yaml.Node]]:
    """Every key of a composed YAML text that belongs to the schema, with its node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*loc, key.value)
            if loc not in (("pools",), ("routes",), ("tenants",)):
                yield place, key
            yield from keys(value, place)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from keys(item, (*loc, index))


KEYS = tuple(keys(yaml.SafeLoader(PRODUCT).get_single_node() or yaml.ScalarNode("", "")))


@given(st.sampled_from(KEYS), st.data())
def test_a_key_with_one_letter_changed_is_told_with_its_path(
    place: tuple[tuple[str | int, ...], yaml.Node], data: st.DataObject
) -> None:
    loc, key = place
    at = data.draw(st.integers(0, len(str(loc[-1])) - 1))
    start, name = key.start_mark.index, str(loc[-1])
    renamed = name[:at] + "Z" + name[at + 1 :]
    text = PRODUCT[:start] + renamed + PRODUCT[start + len(name) :]
    with pytest.raises(ConfigError) as refused:
        loads(text, {})
    told = {mistake.path: mistake for mistake in refused.value.mistakes}
    path = dotted((*loc[:-1], renamed))
    assert path in told
    assert told[path].line == key.start_mark.line + 1
