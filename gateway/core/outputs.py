"""How long answers turn out to be: a smoothed output length a tenant, so that fairness charges what is likely."""

from __future__ import annotations

from gateway.core.types import Call, Usage

_SMOOTHING = 0.2
_GUESS = 0.5
COMPLETION_WEIGHT = 2.0  # an output token costs an engine about twice a prompt token (VTC)


class OutputLengths:
    """One pool's history; as many entries as tenants are configured."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def learn(self, tenant: str, tokens: int) -> None:
        """One sequence of `tenant` came to `tokens` output tokens."""
        before = self._seen.get(tenant, float(tokens))
        self._seen[tenant] = before + _SMOOTHING * (tokens - before)

    def expected_cost(self, call: Call) -> float:
        """Tokens the call is likely to cost: prompt + 2 x output of every sequence."""
        most = call.max_tokens or 0
        output = min(most, self._seen.get(call.tenant.name, most * _GUESS))
        return call.prompt.tokens + COMPLETION_WEIGHT * call.choices * output


def real_cost(usage: Usage) -> float:
    """Tokens the call did cost."""
    return usage.prompt + COMPLETION_WEIGHT * usage.completion
