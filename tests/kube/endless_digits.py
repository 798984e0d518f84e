"""The digits example, which trains on until the file --until is there, and then is done after a pass."""

import sys
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
    pollux.ElasticJob = EndlessJob
    digits.main()
