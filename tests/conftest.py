"""What holds for every test: how hypothesis searches.

In CI the search is the same every time, so that a red build is about the change; at a desk it goes on looking for new
counterexamples. Time limits per example are off: a slow machine is no counterexample.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support import in_ci, size

_COMMON = settings(
    deadline=None,
    print_blob=True,
    max_examples=size("TMS_TEST_EXAMPLES", 100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("desk", _COMMON)
settings.register_profile("ci", _COMMON, derandomize=True, database=None)
settings.load_profile("ci" if in_ci() else "desk")
