"""Settings from the environment: what a snapshot could not hold is refused before the first cycle."""

import pytest
from snapshot_builder import make_snapshot

from pollux.errors import ConfigError
from pollux.settings import settings
from pollux.snapshot import PolicySettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POLLUX_FAIRNESS_P", "1e9"),
        ("POLLUX_FAIRNESS_P", "nan"),
        ("POLLUX_SEED", "-1"),
        ("POLLUX_SEED", str(2**60)),
        ("POLLUX_QUOTAS", f'{{"red": {2**60}}}'),
        ("POLLUX_QUOTAS", '{"red": -1}'),
        ("POLLUX_INTERVAL_S", "0"),
        ("POLLUX_INTERVAL_S", "1e9"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.removeprefix("POLLUX_").lower()):
        settings({"POLLUX_STATE": "state", name: value})


@pytest.mark.parametrize("p", ["-1000", "0", "1000", ""])
def test_what_the_settings_take_a_snapshot_takes(p: str) -> None:
    environ = {"POLLUX_STATE": "state", "POLLUX_FAIRNESS_P": p, "POLLUX_SEED": str(2**53)}
    config = settings(environ | {"POLLUX_QUOTAS": f'{{"red": {2**53}}}'})
    policy = PolicySettings(name=config.policy, fairness_p=config.fairness_p, seed=config.seed)
    snapshot = make_snapshot([], policy=policy, quotas=config.quotas, interval_s=config.interval_s)
    assert snapshot.policy.fairness_p == (float(p) if p else None)
