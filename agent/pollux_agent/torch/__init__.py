"""What a training script imports: ``import pollux_agent.torch as pollux``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pollux_agent.torch.fsdp import join
    from pollux_agent.torch.job import ElasticJob, current_job
    from pollux_agent.torch.world import default_device

__all__ = ["ElasticJob", "current_job", "default_device", "join"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the launcher, which trains nothing, stays small."""
    if name == "default_device":
        from pollux_agent.torch import world

        return world.default_device
    if name == "join":
        from pollux_agent.torch import fsdp

        return fsdp.join
    if name in __all__:
        from pollux_agent.torch import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
