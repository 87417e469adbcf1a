"""Settings of all tests: Hypothesis judges results, never wall time; under CI it draws the same examples every time.

Torch computes on one thread, here and in processes that tests start: xdist's workers share the cores already, and on
tiny models threads that wait for each other take several times as long.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("project"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "project")
