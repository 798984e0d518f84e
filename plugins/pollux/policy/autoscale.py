"""How many nodes a training should rent in a cloud, where it may have as many as it pays for.

By goodput, as Pollux section 5.4.1 proposes, or by throughput, after Or, Zhang and Freedman, "Resource
Elasticity in Distributed Deep Learning" (MLSys 2020). Neither looks at a cluster: each is a function of one
job's model and of the nodes that it has now.
"""

from collections.abc import Callable

import numpy as np

from pollux_agent.model.goodput import GoodputModel
from pollux_agent.model.throughput import FloatArray, IntArray

HIGH_UTILITY, LOW_UTILITY = 2 / 3, 1 / 2
"""U and L of Pollux section 5.4.1: above U of the ideal goodput a job grows, to where it comes down to L."""

_LOWEST_UTILITY = LOW_UTILITY**2 / HIGH_UTILITY

LEAST_GAIN = 1 / 2
"""S of Or et al.: what one more node must add, as a share of what a node does on the average now."""

Autoscaler = Callable[[GoodputModel, int, int, int], int]
"""(model, nodes now, GPUs a node, most nodes) -> nodes."""


def by_goodput(model: GoodputModel, nodes: int, gpus_per_node: int, most: int) -> int:
    """Nodes at which goodput is about L of the ideal, once it is above U of it on those that there are.

    The ideal is the goodput of one node times the nodes. Between L and U the job stays as it is. Where the
    utility falls as far below L as U is above it, the job gives nodes back in the same way; of that the paper
    says nothing.
    """
    counts = np.arange(1, most + 1)
    goodput = model.best(counts, counts * gpus_per_node).goodput
    utility = goodput / (counts * goodput[0]) if goodput[0] > 0 else np.zeros(most)
    if _LOWEST_UTILITY <= utility[nodes - 1] <= HIGH_UTILITY:
        return nodes
    return int(counts[utility >= LOW_UTILITY].max(initial=1))


def by_throughput(model: GoodputModel, nodes: int, gpus_per_node: int, most: int) -> int:
    """Nodes up to which each one more still adds S of what a node does on the average."""
    rate = throughput(model, np.arange(1, most + 1), gpus_per_node)
    while nodes < most and rate[nodes] - rate[nodes - 1] >= LEAST_GAIN * rate[nodes - 1] / nodes:
        nodes += 1
    return nodes


def throughput(model: GoodputModel, nodes: IntArray, gpus_per_node: int) -> FloatArray:
    """Samples a second on each number of nodes, every GPU as full as it gets; useful or not."""
    gpus = nodes * gpus_per_node
    if model.params is None:
        return np.asarray(gpus, dtype=np.float64)
    local = full_batch(model, gpus)
    return np.asarray(gpus * local / model.params.step_time(nodes, gpus, local))


def full_batch(model: GoodputModel, gpus: IntArray | int) -> IntArray:
    """The largest batch of one GPU whose total on ``gpus`` GPUs stays within the job's limit, at least 1."""
    limits = model.limits
    share = limits.max_batch_size // np.asarray(gpus)
    return np.asarray(np.clip(share, 1, max(limits.max_local_batch_size, 1)))


AUTOSCALERS: dict[str, Autoscaler] = {"goodput": by_goodput, "throughput": by_throughput}
