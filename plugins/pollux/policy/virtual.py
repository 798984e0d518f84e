"""Larger nodes counted as several equal virtual ones: how Pollux is run on several types of GPU."""

from dataclasses import replace

import numpy as np

from pollux.policy.problem import Problem, fair_goodput


def cut(problem: Problem) -> Problem:
    """The problem with every node counted as virtual nodes of :func:`common_size`; Sia section 4.3.

    A job on more GPUs of a node than a virtual one has counts as one that spans nodes. The virtual nodes of a
    node are alike, so a matrix does not number them: its columns stay the real nodes, and a row takes as few
    virtual nodes as its GPUs fill. So each rule is kept on the real nodes, there a job on one node never
    spans, and of rows that count alike the one on fewest real nodes wins. A job that is of use within a node
    only, or across nodes only, has its nodes counted whole.
    """
    size = common_size(problem)
    if not size:
        return problem
    largest, number = int(problem.capacity.max()), problem.capacity // size
    goodput = problem.goodput[:, :, :3]
    useful = goodput[:, :, 1:, 2 : largest + 1] > 0
    whole = np.any(useful[:, :, 0] != useful[:, :, 1], axis=(1, 2))
    virtual_type = np.repeat(problem.node_type, number)
    fair = fair_goodput(goodput, problem.fair_gpus, np.full_like(virtual_type, size), virtual_type)
    return replace(
        problem,
        goodput=goodput,
        fair=np.where(whole, problem.fair, fair),
        part=np.where(whole, largest, size),
    )


def common_size(problem: Problem) -> int:
    """GPUs of a virtual node: the most that divide every node, as 4 do 4, 8 and 16; 0 where none is cut.

    That is where there is one type of GPU, where all nodes are equal, and where no size but 1 divides them
    (3 and 4): virtual nodes of one GPU would make a job of two one that spans nodes.
    """
    there = problem.capacity > 0
    sizes = np.unique(problem.capacity[there])
    if len(sizes) < 2 or len(np.unique(problem.node_type[there])) < 2:
        return 0
    size = int(np.gcd.reduce(sizes))
    return size if size > 1 else 0
