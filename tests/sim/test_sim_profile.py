from __future__ import annotations

from pathlib import Path

import pytest

from gateway.sim.profile import ProfileError, load_profile


@pytest.mark.parametrize("name", ["7b", "70b", "fast"])
def test_shipped_profiles_load(name: str) -> None:
    assert load_profile(name).name == name


def test_the_7b_constants_are_those_of_the_engine_model() -> None:
    profile = load_profile("7b")
    assert (profile.t0, profile.a, profile.b, profile.c, profile.q) == (0.008, 35e-6, 25e-6, 0.05e-6, 1.3e-9)
    assert (profile.kv_tokens, profile.block_size, profile.blocks) == (262144, 16, 16384)
    assert (profile.max_num_seqs, profile.max_num_batched_tokens) == (256, 2048)


GOOD = """
name: mine
t0: 1
a: 0
b: 0
c: 0
q: 0
kv_tokens: 64
block_size: 4
max_num_seqs: 2
max_num_batched_tokens: 8
max_model_len: 32
"""


def test_a_file_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "max_queued_reqs: null\n")
    profile = load_profile(path)
    assert (profile.name, profile.scheduling, profile.keepalive, profile.max_queued_reqs) == ("mine", "fcfs", 5.0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "colour: blue", "unknown keys: colour"),
        (GOOD + "t0: 2", "repeated keys: t0"),
        (GOOD.replace("t0: 1", ""), "missing keys: t0"),
        (GOOD.replace("t0: 1", "t0: 0"), "t0 must be more than 0"),
        (GOOD.replace("t0: 1", "t0: soon"), "t0 must be float"),
        (GOOD.replace("block_size: 4", "block_size: true"), "block_size must be int"),
        (GOOD.replace("block_size: 4", "block_size: 0"), "block_size must be at least 1"),
        (GOOD.replace("max_model_len: 32", "max_model_len: 65"), "must hold one max_model_len"),
        (GOOD + "scheduling: lifo", "scheduling must be fcfs or priority"),
        (GOOD + "speed: 0", "speed must be more than 0"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "profile"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=f"bad.yaml.*{said}|{said}"):
        load_profile(path)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ProfileError, match="nope"):
        load_profile("nope")
