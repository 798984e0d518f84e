"""AdaptDL's search for an allocation: JSON snapshots on the input, CPU seconds and allocations on the output.

Run as a file, by the interpreter of the peers' environment, which does not have this package. The search is
adaptdl-sched's own, from its speed-up functions to NSGA-II; what it maximises is FITNESS_p of Pollux Eq. 14,
so that both sides look for the same. It goes on for some rounds on the same snapshot, each from the
population of the one before; its answer is that of the last.
"""

import json
import sys
import time
from contextlib import redirect_stdout
from typing import Any


def searched(question: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from adaptdl.goodput import (  # type: ignore[import-not-found,unused-ignore]
        GoodputFunction,
        GradParams,
        PerfParams,
    )
    from adaptdl_sched.policy import pollux  # type: ignore[import-not-found,unused-ignore]
    from adaptdl_sched.policy.speedup import SpeedupFunction  # type: ignore[import-not-found,unused-ignore]
    from adaptdl_sched.policy.utils import JobInfo, NodeInfo  # type: ignore[import-not-found,unused-ignore]

    jobs = {job["job_id"]: job for job in question["jobs"]}

    def speedup(job: dict[str, Any]) -> Any:
        fit = job["params"]
        perf = PerfParams(
            alpha_c=fit["alpha_grad"],
            beta_c=fit["beta_grad"],
            alpha_n=fit["alpha_sync_node"],
            beta_n=fit["beta_sync_node"],
            alpha_r=fit["alpha_sync_local"],
            beta_r=fit["beta_sync_local"],
            gamma=fit["gamma"],
        )
        grad = GradParams(sqr=1.0, var=job["noise_scale"] / job["initial_batch_size"])
        return SpeedupFunction(
            GoodputFunction(perf, grad, job["initial_batch_size"]),
            max_batch_size=job["max_batch_size"],
            atomic_bsz_range=(job["min_local_batch_size"], job["max_local_batch_size"]),
            accumulation=True,
        )

    def evaluate(problem: Any, states: Any, out: dict[str, Any], *_: Any, **__: Any) -> None:
        """FITNESS_p in the place of the sum of speed-ups; the second objective stays."""
        states = states.reshape(states.shape[0], *problem._base_state.shape)
        gained = problem._get_job_speedups(states) * problem.per_fair
        changed = np.any(states != problem._base_state, axis=2)
        gained = np.where(changed, problem.factor * gained, gained) + question["floor"]
        p = question["fairness_p"]
        fitness = np.mean(gained**p, axis=1) ** (1 / p)
        out["F"] = np.column_stack([-fitness, problem._get_cluster_sizes(states)])

    class Problem(pollux.Problem):  # type: ignore[misc]
        def __init__(self, infos: Any, nodes: Any, base_state: Any) -> None:
            super().__init__(infos, nodes, base_state)
            rows = [jobs[info.job_id] for info in infos]
            fair = [
                info.speedup_fn(row["fair_nodes"], row["fair_gpus"])
                for info, row in zip(infos, rows, strict=True)
            ]
            self.per_fair = 1 / np.array(fair)
            self.factor = np.array([row["factor"] for row in rows])

        _evaluate = evaluate

    pollux.Problem = Problem
    np.random.seed(question["seed"])
    nodes = {name: NodeInfo({"gpu": gpus}, False) for name, gpus in question["nodes"].items()}
    held = {
        job_id: [name for name, gpus in job["placement"].items() for _ in range(gpus)]
        for job_id, job in jobs.items()
    }
    policy = pollux.PolluxPolicy()
    policy._min_util, policy._max_util = 0.0, float("inf")  # a cluster of a fixed size
    seconds, found = [], {}
    for _ in range(question["rounds"]):
        began = time.process_time()
        infos = {}
        for age, (job_id, job) in enumerate(jobs.items()):
            infos[job_id] = JobInfo({"gpu": 1}, speedup(job), age, 0, job["max_replicas"])
            infos[job_id].job_id = job_id
        found, _ = policy.optimize(infos, nodes, held, NodeInfo({"gpu": question["width"]}, False))
        seconds.append(time.process_time() - began)
    return {"seconds": seconds, "allocations": found}


def main() -> None:
    with redirect_stdout(sys.stderr):  # pymoo says there that it is not compiled
        answers = [searched(question) for question in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
