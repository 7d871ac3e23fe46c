"""Written values become typed ones, or an answer that says how they are written."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.config import values
from gateway.config.tree import FromEnv
from gateway.core.types import Rate


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2s", 2.0),
        ("25ms", 0.025),
        ("1h", 3600.0),
        ("5m", 300.0),
        ("7d", 604800.0),
        (0, 0.0),
        ("0s", 0.0),
        ("1.5s", 1.5),
    ],
)
def test_durations(written: object, seconds: float) -> None:
    assert values.duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", [2, 2.0, "2", "2 seconds", "-1s", True, False, "off", "", [], "2S"])
def test_a_duration_needs_its_unit(written: object) -> None:
    with pytest.raises(ValueError, match="duration with its unit"):
        values.duration(written)


@pytest.mark.parametrize(
    ("written", "size"), [("8MiB", 8 << 20), ("64KiB", 65536), ("1GiB", 1 << 30), ("512B", 512), (0, 0)]
)
def test_sizes(written: object, size: int) -> None:
    assert values.size(written) == size


@pytest.mark.parametrize("written", ["8MB", "8", 8, True, "MiB", "-8MiB"])
def test_a_size_needs_its_unit(written: object) -> None:
    with pytest.raises(ValueError, match="size with its unit"):
        values.size(written)


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ("600/min", Rate(600, 60)),
        ("50M/day", Rate(50e6, 86400)),
        ("10/s", Rate(10, 1)),
        ("200k/h", Rate(200e3, 3600)),
        ("0/min", Rate(0, 60)),
        (0, Rate(0, 60)),
    ],
)
def test_rates(written: object, rate: Rate) -> None:
    assert values.rate(written) == rate


@pytest.mark.parametrize("written", [600, "600", "600/year", "600 per min", "-1/s", True, "1T/s"])
def test_a_rate_needs_its_period(written: object) -> None:
    with pytest.raises(ValueError, match="amount a period"):
        values.rate(written)


@pytest.mark.parametrize("written", ["600/min", "50000000/day", "10/s", "1.5/h"])
def test_a_rate_is_shown_as_it_is_written(written: str) -> None:
    assert values.rate_text(values.rate(written)) == written


def test_addresses() -> None:
    assert values.address("0.0.0.0:8000") == values.Address("0.0.0.0", 8000)
    assert values.address("[::1]:0") == values.Address("::1", 0)
    assert str(values.address("[::1]:0")) == "[::1]:0"


@pytest.mark.parametrize("written", [8000, ":8000", "host", "host:", "host:99999", "host:-1", "::1:80", "host:08"])
def test_an_address_has_host_and_port(written: object) -> None:
    with pytest.raises(ValueError, match="host:port"):
        values.address(written)


@pytest.mark.parametrize(
    ("written", "holds", "fails"), [(">6000", 6001, 6000), ("<= 5", 5, 6), ("==3", 3, 4), (">=2", 2, 1), ("<2", 1, 2)]
)
def test_comparisons(written: str, holds: int, fails: int) -> None:
    assert values.comparison(written).holds(holds)
    assert not values.comparison(written).holds(fails)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_freeze_covers_its_hours_in_its_zone() -> None:
    freeze = values.freeze("Mon-Fri 09:00-21:00 Asia/Shanghai")
    assert freeze.covers(at("2026-03-02T01:00"))  # Monday, 09:00 there
    assert not freeze.covers(at("2026-03-02T00:59"))
    assert not freeze.covers(at("2026-03-02T13:00"))  # 21:00 there
    assert not freeze.covers(at("2026-03-07T02:00"))  # Saturday


def test_freeze_past_midnight_belongs_to_the_day_it_starts_on() -> None:
    freeze = values.freeze("Fri-Mon 22:00-06:00 UTC")
    assert freeze.covers(at("2026-03-06T23:00"))  # Friday
    assert freeze.covers(at("2026-03-10T05:59"))  # Tuesday morning, begun on Monday
    assert not freeze.covers(at("2026-03-06T05:00"))  # Friday morning, begun on Thursday
    assert not freeze.covers(at("2026-03-10T22:30"))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("Mon-Fry 09:00-21:00 UTC", "did you mean Fri"),
        ("Mon 09:00-21:00 Asia/Shanghia", "time zone"),
        ("Mon 09:00-21:00 Asia", "time zone"),
        ("Mon 9:00-21:00 UTC", "days, hours and zone"),
        ("Mon 25:00-26:00 UTC", "days, hours and zone"),
        (True, "days, hours and zone"),
    ],
)
def test_freeze_says_what_is_wrong(written: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        values.freeze(written)


def test_a_percentage_is_answered_with_the_fraction() -> None:
    with pytest.raises(ValueError, match=r"write 0\.05"):
        values.number("5%")


def test_text_of_the_environment_is_a_number_where_one_is_wanted_and_never_shown() -> None:
    assert values.whole(FromEnv("64", "${N}")) == 64
    assert values.flag(FromEnv("true", "${ON}")) is True
    with pytest.raises(ValueError, match=r"\$\{N\}") as told:
        values.whole(FromEnv("hunter2", "${N}"))
    assert "hunter2" not in str(told.value)
    with pytest.raises(ValueError, match="without quotes"):
        values.whole("64")
