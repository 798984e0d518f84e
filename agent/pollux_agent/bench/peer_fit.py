"""Fits AdaptDL's throughput model: JSON profiles on the input, CPU seconds and parameters on the output.

Run as a file, by the interpreter of the peers' environment, which does not have this package.
"""

import json
import sys
import time
from typing import Any


def fitted(profile: list[dict[str, Any]], repeat: int) -> dict[str, Any]:
    import numpy as np
    from adaptdl.goodput import fit_perf_params  # type: ignore[import-not-found,unused-ignore]

    columns = [
        np.array([point[name] for point in profile])
        for name in (
            "num_nodes",
            "num_replicas",
            "local_batch_size",
            "accum_step_time_s",
            "optim_step_time_s",
        )
    ]
    seconds = []
    for _ in range(repeat):
        began = time.process_time()
        found = fit_perf_params(*columns)
        seconds.append(time.process_time() - began)
    return {
        "seconds": seconds,
        "alpha_grad": found.alpha_c,
        "beta_grad": found.beta_c,
        "alpha_sync_local": found.alpha_r,
        "beta_sync_local": found.beta_r,
        "alpha_sync_node": found.alpha_n,
        "beta_sync_node": found.beta_n,
        "gamma": found.gamma,
    }


def main() -> None:
    question = json.load(sys.stdin)
    json.dump([fitted(profile, question["repeat"]) for profile in question["profiles"]], sys.stdout)


if __name__ == "__main__":
    main()
