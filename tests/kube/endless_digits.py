"""The digits example, which trains on until the file --until is there, and then is done after a pass.

Each image takes a moment longer than its arithmetic, as with a larger model: so two GPUs are worth having on
any machine, and the scheduler gives them as soon as they are free.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agent" / "examples"))

import digits

import pollux_agent.torch as pollux


def everywhere(flag: bool) -> bool:
    """Whether any replica says so: all of them get the same answer."""
    if not dist.is_initialized():
        return flag
    said = torch.tensor(float(flag))
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return bool(said.item())


PER_IMAGE_S = 0.002


def dwell(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    if model.training:
        time.sleep(PER_IMAGE_S * len(inputs[0]))


class SlowNet(digits.Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_forward_pre_hook(dwell)


class EndlessJob(pollux.ElasticJob):
    """Ends once it may."""

    until: Path

    def epochs(self, num_epochs: float) -> Iterator[int]:
        for epoch in super().epochs(num_epochs):
            yield epoch
            if everywhere(self.until.exists()):
                self.finish()
                return


if __name__ == "__main__":
    EndlessJob.until = Path(sys.argv.pop())
    assert sys.argv.pop() == "--until"
    pollux.ElasticJob, digits.Net = EndlessJob, SlowNet
    digits.main()
