"""Reads the gateway's own gauges from its operations port."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loadtests.client import Client, request

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LIMIT = 5.0  # s for a scrape


class GaugesError(Exception):
    """The metrics cannot be had, or lack what is needed."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Samples of one scrape: (name, labels, value)."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` that carry `labels`; GaugesError if there is none: none is not 0."""
        found = [
            value
            for each, has, value in self.samples
            if each == name and all(has.get(key) == wanted for key, wanted in labels.items())
        ]
        if not found:
            raise GaugesError(f"the metrics have no {name} for {labels}")
        return sum(found)


def parse(text: str) -> Gauges:
    """The samples of a Prometheus exposition."""
    samples = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            samples.append((match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])))
    return Gauges(tuple(samples))


async def read(client: Client) -> Gauges:
    """Scrape now. Raises GaugesError."""
    answer = await client.call(request("GET", "/metrics"), _LIMIT)
    if answer.status != 200:
        raise GaugesError(f"/metrics: {answer.ended.value}, status {answer.status}")
    return parse(answer.body.decode())
