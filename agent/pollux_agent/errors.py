"""Errors of the agent, one tree.

::

    PolluxAgentError
    ├── DocumentError      a document (job spec, report, ...) is malformed: names field, value and fix; final
    ├── ScriptError        the training script cannot be run (missing, not a file); final
    ├── CheckpointError    a checkpoint cannot be written, or none of those present is whole
    ├── LoopError          the training loop does what cannot be averaged over replicas, or makes no update;
    │                      final
    └── FencedError        a newer incarnation of this job exists: this one must stop writing; final
"""


class PolluxAgentError(Exception):
    """Base of every error that the agent raises on purpose."""


class DocumentError(PolluxAgentError, ValueError):
    """A document that crosses between agent and scheduler is malformed."""


class ScriptError(PolluxAgentError):
    """The training script cannot be started."""


class CheckpointError(PolluxAgentError):
    """A checkpoint cannot be written, or none of the checkpoints present is whole."""


class LoopError(PolluxAgentError):
    """The training loop calls things in an order, or a number, that cannot be averaged over replicas, or its
    steps make no update."""


class FencedError(PolluxAgentError):
    """A newer incarnation of this job exists, so this one may not write any more."""
