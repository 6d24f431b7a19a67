"""Profiles of the property tests, chosen by the environment variable HYPOTHESIS_PROFILE: dev, ci or nightly."""

import os

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile("dev", max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=_QUIET)
settings.register_profile(
    "ci", max_examples=100, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "nightly", max_examples=2000, stateful_step_count=100, deadline=None, suppress_health_check=_QUIET
)


def load() -> settings:
    """The chosen profile; importing test modules use it as their default."""
    name = os.environ.get("HYPOTHESIS_PROFILE", "dev")
    settings.load_profile(name)
    return settings.get_profile(name)
