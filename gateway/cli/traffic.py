"""A little traffic for the demo: easy and hard prompts, online and batch, about one call a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import cycle

from gateway.core.rewrite import CHAT
from gateway.upstream.client import HttpClient
from gateway.upstream.wire import Outgoing, UpstreamFailed

_EVERY = 1.0  # s
_PROMPTS = (
    ("tg-demo-online", "Translate to French: good morning"),
    ("tg-demo-online", "Classify the sentiment of: I love this product"),
    ("tg-demo-batch", "Extract the names from: Ada met Grace and Edsger"),
    ("tg-demo-online", "Prove step by step that there are infinitely many primes"),
    ("tg-demo-small-only", "Summarize in one line: the meeting moved to Friday"),
    ("tg-demo-online", "Write a Python function that merges two sorted lists, with unit tests"),
)
_SHOWN = len(_PROMPTS)


class Traffic:
    """Sends to the gateway on `port` until it drains; the first round of answers is shown."""

    def __init__(self, port: int, draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._client = HttpClient("127.0.0.1", port)
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until the gateway drains."""
        for number, (key, prompt) in enumerate(cycle(_PROMPTS)):
            if self._draining():
                return
            call = asyncio.create_task(self._call(key, prompt, show=number < _SHOWN))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            await asyncio.sleep(_EVERY)

    async def _call(self, key: str, prompt: str, show: bool) -> None:
        body = {"model": "auto", "stream": True, "max_tokens": 200, "messages": [{"role": "user", "content": prompt}]}
        headers = ((b"authorization", b"Bearer " + key.encode()), (b"content-type", b"application/json"))
        try:
            answer = await self._client.send(Outgoing(b"POST", CHAT.encode(), headers, json.dumps(body).encode()))
            while await answer.read():
                pass
            told = {name.decode(): value.decode() for name, value in answer.headers}
            answer.close()
        except UpstreamFailed as failed:
            told = {"x-tiergate-reason": failed.kind.value}
        if show:
            tier, why = told.get("x-tiergate-tier", "refused"), told.get("x-tiergate-route", "")
            print(f"  {prompt:<70} -> {tier:<6} {told.get('x-tiergate-reason', why)}", flush=True)
