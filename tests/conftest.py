"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadline for one example: how long it takes says more about the machine than about the code.
settings.register_profile("tiergate", deadline=None)
settings.load_profile("tiergate")
