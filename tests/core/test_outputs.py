"""What a call is likely to cost: half of its cap at first, then what its tenant's answers turn out to be."""

from __future__ import annotations

import pytest

from gateway.core.outputs import OutputLengths, real_cost
from gateway.core.types import Prompt, Tenant, Usage
from tests.core.making import a_call

CALL = a_call(prompt=Prompt(100), max_tokens=200)


def test_half_of_the_cap_is_guessed_before_anything_is_known() -> None:
    assert OutputLengths().expected_cost(CALL) == 100 + 2 * 100


def test_a_tenants_own_answers_replace_the_guess() -> None:
    lengths = OutputLengths()
    lengths.learn("acme", 40)
    assert lengths.expected_cost(CALL) == 100 + 2 * 40
    assert lengths.expected_cost(a_call(tenant=Tenant("other"), prompt=Prompt(100), max_tokens=200)) == 300
    for _ in range(50):
        lengths.learn("acme", 90)
    assert lengths.expected_cost(CALL) == pytest.approx(100 + 2 * 90, rel=0.01)


def test_nothing_longer_than_the_cap_is_expected() -> None:
    lengths = OutputLengths()
    lengths.learn("acme", 5000)
    assert lengths.expected_cost(CALL) == 100 + 2 * 200


def test_every_sequence_costs() -> None:
    assert OutputLengths().expected_cost(a_call(prompt=Prompt(100), max_tokens=200, choices=3)) == 100 + 3 * 200


def test_an_output_token_costs_two() -> None:
    assert real_cost(Usage(prompt=100, completion=50)) == 200
