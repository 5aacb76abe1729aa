"""What all tests share: how many examples the property tests draw."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A deadline per example is a wall-clock assertion, and these tests run beside other work.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
