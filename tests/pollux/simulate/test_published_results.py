"""The published completion times: exact for the two baselines, near for the randomised search."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_limits

from pollux.simulate.reproduce import REFERENCE_FILE, Case, cases
from pollux.simulate.results import summary
from pollux.simulate.runner import prepare

pytestmark = [pytest.mark.needs("traces"), pytest.mark.slow, pytest.mark.timeout(1800)]


def published(traces: Path) -> Mapping[str, Any]:
    return dict(json.loads((traces / REFERENCE_FILE).read_text()))


def average_s(case: Case, traces: Path) -> float:
    run = case.run(traces)
    with threadpool_limits(limits=1):
        result = summary(prepare(run).run(), run.cluster)
    assert result["unfinished"] == 0
    return float(result["avg_jct_s"])


@pytest.mark.parametrize("load", ["0.5", "1.0", "1.5", "2.0"])
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_the_baselines_are_exact_on_every_workload(recorded: Path, policy: str, load: str) -> None:
    group = [case for case in cases(recorded) if case.group == f"{policy} load {load}"]
    assert len(group) == len(published(recorded)["load"][policy][load]) >= 5
    for case in group:
        assert average_s(case, recorded) == pytest.approx(case.reference_s, rel=1e-3)


def test_the_search_comes_near_the_published_average(recorded: Path) -> None:
    """One workload, where single runs of either search vary by a few per cent."""
    group = [case for case in cases(recorded) if case.group == "pollux load 0.5"]
    case = next(case for case in group if case.workload.endswith("workload-6"))
    assert case.reference_s is not None
    assert 0.9 < average_s(case, recorded) / case.reference_s < 1.06
