"""What an API server's refusal means: for one job, or for the whole cluster."""

import pytest

from pollux.cluster.k8s.calls import translated
from pollux.errors import ClusterUnavailable, Refused
from pollux_agent.driver.kube.api import KubeError


@pytest.mark.parametrize(
    ("status", "writes", "job_id", "kind"),
    [
        pytest.param(500, True, "job", Refused, id="a webhook of the job's namespace is down"),
        pytest.param(500, True, "", ClusterUnavailable, id="nothing of a job's"),
        pytest.param(500, False, "job", ClusterUnavailable, id="a read"),
        pytest.param(503, True, "job", ClusterUnavailable, id="the server is away"),
        pytest.param(429, True, "job", ClusterUnavailable, id="too many calls"),
    ],
)
def test_what_a_status_costs(status: int, writes: bool, job_id: str, kind: type[Exception]) -> None:
    with pytest.raises(kind), translated("patch", job_id=job_id, writes=writes):
        raise KubeError("PATCH /x: refused", status)
