"""Processes forked from one that has torch loaded, which would take each of them seconds of its own."""

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOADED = ["pytest", "torch._dynamo", "pollux_agent.torch.job"]
"""``torch._dynamo`` because the first optimizer imports it."""


def forked() -> ForkServerContext:
    """The context to start them from: a session has one fork server, which loads what its first user says."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
