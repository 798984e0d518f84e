"""The API's errors as errors of a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager

from pollux.errors import ClusterError, ClusterUnavailable, Conflict, Refused, UnknownJob
from pollux_agent.driver.kube.api import KubeError


@contextmanager
def translated(what: str, *, job_id: str = "", writes: bool = False) -> Iterator[None]:
    """KubeErrors inside become ClusterErrors.

    A right that is missing to write is a refusal; one that is missing to read makes the cluster unavailable,
    as does a quota that is used up: it may be there later.
    """
    try:
        yield
    except KubeError as error:
        raise _as_cluster_error(error, what, job_id, writes) from None


def _as_cluster_error(error: KubeError, what: str, job_id: str, writes: bool) -> ClusterError:
    text = f"{what}: {error}"
    if error.status == 500 and writes and job_id:  # such as a webhook of the job's namespace that is down
        return Refused(text)
    if error.unavailable or (error.status == 403 and "exceeded quota" in str(error)):
        return ClusterUnavailable(text)
    if error.status == 404 and job_id:
        return UnknownJob(f"the cluster has no job {job_id!r}")
    if error.status in (401, 403):
        kind = Refused if writes else ClusterUnavailable
        return kind(f"{text}; grant the right to this service account")
    if error.status == 409:
        return Conflict(text)
    return Refused(text)
