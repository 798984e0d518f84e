"""Acting on the cluster in memory, one patch after the other and several at once."""

import random

import pytest
from cycle_builder import a_spec, an_identity

from pollux.act import Act
from pollux.cluster.memory import MemoryCluster
from pollux.errors import ClusterUnavailable
from pollux.observe import occupied
from pollux.plan import Action
from pollux.snapshot import Node

SIZE = 4


class Several(MemoryCluster):
    patches_at_once = 8


CLUSTERS = [pytest.param(MemoryCluster, id="one at a time"), pytest.param(Several, id="several at once")]


def made(kind: type[MemoryCluster], placements: dict[str, dict[str, int]], *, nodes: int) -> MemoryCluster:
    """A cluster on which each job trains where it was placed."""
    cluster = kind(tuple(Node(name=f"node-{number}", gpus=SIZE) for number in range(nodes)))
    for job_id in placements:
        cluster.submit(job_id, identity=an_identity(job_id), spec=a_spec(job_id), run_id=None)
    actions = [action(cluster, job_id, placement) for job_id, placement in placements.items()]
    act(cluster, actions)
    cluster.observe()
    return cluster


def action(cluster: MemoryCluster, job_id: str, after: dict[str, int]) -> Action:
    now = cluster.job(job_id).allocation
    return Action(
        job_id=job_id, kind="move", before=now.placement, after=after, expected=now.decision, reason="test"
    )


def act(cluster: MemoryCluster, actions: list[Action], wait_s: float = 0.0) -> dict[str, str]:
    done = Act(cluster, actions, decision=cluster.next_decision(), still_ours=lambda: True).run(wait_s)
    return {outcome.job_id: outcome.outcome for outcome in done}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_of_two_that_want_the_same_gpus_one_gets_them(kind: type[MemoryCluster]) -> None:
    cluster = made(kind, {"one": {}, "two": {}}, nodes=1)
    wanted = [action(cluster, job_id, {"node-0": SIZE}) for job_id in ("one", "two")]
    assert act(cluster, wanted) == {"one": "done", "two": "waits"}


@pytest.mark.parametrize("kind", CLUSTERS)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_planned_no_gpu_is_given_twice_and_all_that_fits_is_done(
    kind: type[MemoryCluster], seed: int
) -> None:
    rng = random.Random(seed)
    before, after = _split(rng), _split(rng)
    cluster = made(kind, before, nodes=3)
    cluster.lag = 1
    seen: list[int] = []

    def check(method: str) -> None:
        for number in range(3):
            used = sum(occupied(job).get(f"node-{number}", 0) for job in cluster.jobs)
            seen.append(used)
            assert used <= SIZE, f"node-{number} is given twice: {cluster.jobs}"

    cluster.after = check
    wanted = [action(cluster, job_id, placement) for job_id, placement in after.items()]
    for _ in range(4):  # cycles: what moves in a circle stops first
        left = [one for one in wanted if dict(cluster.job(one.job_id).allocation.placement) != one.after]
        act(cluster, [action(cluster, one.job_id, dict(one.after)) for one in left], wait_s=0.5)
    assert {job_id: dict(cluster.job(job_id).allocation.placement) for job_id in after} == after
    assert seen


def _split(rng: random.Random) -> dict[str, dict[str, int]]:
    """Ten jobs share three nodes' GPUs by chance."""
    placements: dict[str, dict[str, int]] = {f"job-{number}": {} for number in range(10)}
    for number in range(3):
        for _ in range(rng.randint(SIZE - 1, SIZE)):
            placement = placements[f"job-{rng.randrange(10)}"]
            placement[f"node-{number}"] = placement.get(f"node-{number}", 0) + 1
    return placements


def test_a_cluster_that_stops_answering_is_asked_no_more() -> None:
    ids = [f"job-{number}" for number in range(40)]
    cluster = made(Several, {job_id: {} for job_id in ids}, nodes=10)
    tried: list[str] = []

    def go_away(method: str) -> None:
        if method == "patch_allocation":
            tried.append(method)
            raise ClusterUnavailable("the service is gone")

    cluster.before = go_away
    found = act(cluster, [action(cluster, job_id, {f"node-{job_id[4:-1] or 0}": 1}) for job_id in ids])
    assert set(found.values()) == {"unavailable"}
    assert len(tried) <= Several.patches_at_once, "those that were on their way"
