"""Accounts in this process: the reservation is given back on every way out, and reloads keep what did not change."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.quota import Remaining
from gateway.core.refusal import Reason, Refused
from gateway.core.types import Limits, Prompt, Rate, Tenant, Usage
from gateway.store.memory import MemoryQuota
from tests.core.making import a_call


def in_progress(store: MemoryQuota) -> dict[str, int]:
    return {each.name: each.in_progress for each in store.views()}


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


LIMITS = Limits(requests=Rate(10, 60.0), tokens=Rate(1000, 60.0), concurrent=2)
ACME = Tenant("acme", limits=LIMITS)
CALL = a_call(tenant=ACME, prompt=Prompt(100), max_tokens=100)


def quota(clock: Clock, *tenants: Tenant) -> MemoryQuota:
    store = MemoryQuota(clock)
    store.configure(tenants or (ACME,))
    return store


async def left(store: MemoryQuota, tenant: Tenant = ACME) -> tuple[int, int]:
    """Requests and tokens that are left, asked by a call that costs nothing and is given back."""
    async with store.reserved(a_call(tenant=tenant, prompt=Prompt(0), max_tokens=0)) as account:
        requests, tokens = account.remaining
        assert requests is not None and tokens is not None
        return requests.remaining + 1, tokens.remaining


async def test_the_account_settles_to_what_was_used() -> None:
    store = quota(Clock())
    async with store.reserved(CALL) as account:
        assert account.remaining == (Remaining(10, 9, 6.0), Remaining(1000, 800, 12.0))
        assert in_progress(store) == {"acme": 1}
        account.used = Usage(90, 10)
    assert in_progress(store) == {"acme": 0}
    assert await left(store) == (9, 900)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_a_call_that_failed_before_it_was_served_gets_all_back(error: type[BaseException]) -> None:
    store = quota(Clock())
    with pytest.raises(error):
        async with store.reserved(CALL):
            raise error
    assert in_progress(store) == {"acme": 0}
    assert await left(store) == (10, 1000)


async def test_what_a_broken_call_used_is_charged() -> None:
    store = quota(Clock())
    with pytest.raises(RuntimeError):
        async with store.reserved(CALL) as account:
            account.used = Usage(100, 7)
            raise RuntimeError
    assert await left(store) == (9, 893)


async def test_a_refused_call_counts_nowhere_but_learns_what_is_left() -> None:
    store = quota(Clock())
    async with store.reserved(CALL), store.reserved(CALL):
        third = store.reserved(CALL)
        with pytest.raises(Refused) as refused:
            async with third:
                pass
        assert refused.value.refusal.reason is Reason.TENANT_CONCURRENCY
        assert third.remaining == (Remaining(10, 8, 12.0), Remaining(1000, 600, 24.0))
        assert in_progress(store) == {"acme": 2}
    assert in_progress(store) == {"acme": 0}


async def test_what_was_spent_flows_back_with_the_clock() -> None:
    clock = Clock()
    store = quota(clock)
    async with store.reserved(CALL) as account:
        account.used = Usage(200)
    clock.now += 6.0
    assert await left(store) == (10, 900)


async def test_a_reload_without_changes_keeps_the_counters() -> None:
    """LM-16."""
    store = quota(Clock())
    async with store.reserved(CALL) as account:
        account.used = Usage(500)
    store.configure([ACME, Tenant("new", limits=LIMITS)])
    assert await left(store) == (9, 500)
    assert await left(store, Tenant("new")) == (10, 1000)


async def test_changed_limits_are_in_force_at_once() -> None:
    """LM-18."""
    store = quota(Clock())
    for _ in range(5):
        async with store.reserved(CALL) as account:
            account.used = Usage(100)
    store.configure([Tenant("acme", limits=Limits(requests=Rate(10, 60.0), tokens=Rate(400, 60.0)))])
    assert await left(store) == (10, 400)


async def test_a_call_in_progress_settles_with_the_limits_it_came_under() -> None:
    store = quota(Clock())
    async with store.reserved(CALL) as account:
        store.configure([Tenant("acme", limits=Limits(requests=Rate(5, 60.0), tokens=Rate(50, 60.0)))])
        account.used = Usage(100)
    assert in_progress(store) == {"acme": 0}
    assert await left(store) == (5, 50)


async def test_tenants_do_not_share() -> None:
    other = Tenant("other", limits=LIMITS)
    store = quota(Clock(), ACME, other)
    async with store.reserved(CALL), store.reserved(CALL):
        assert await left(store, other) == (10, 1000)
