"""What a script may put in place of the built-in parts of its job."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux_agent.errors import DocumentError
from pollux_agent.model.racks import RackThroughput
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.scaling import Legw


class Tripled:
    """A user's rule."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return 3.0


def rates(**options: Any) -> tuple[list[float], ElasticJob]:
    """The learning rate of every update of a small job, 0.1 at M0 = 4."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    optimizer.register_step_pre_hook(note)
    inputs = torch.randn(64, 3)
    job = ElasticJob(
        model, optimizer, TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, **options
    )
    for _ in job.epochs(3):
        batch: tuple[Tensor, Tensor]
        for batch in job.loader:
            optimizer.zero_grad()
            loss = (job.model(batch[0]) - batch[1]).square().mean()
            loss.backward()
            optimizer.step()
            job.log(loss=loss.item())
    return seen, job


def test_a_rule_of_ones_own_scales_every_update() -> None:
    seen, job = rates(scaling_rule=Tripled())
    assert seen == pytest.approx([0.3] * job.step)
    assert job.complete


def test_legw_warms_up_update_by_update() -> None:
    seen, _ = rates(scaling_rule=Legw(warm_up_steps=8), max_batch_size=4)
    assert seen[:10] == pytest.approx([0.1 * min(1.0, step / 8) for step in range(1, 11)])


def test_another_throughput_model_and_a_watched_loss_go_with_a_whole_training() -> None:
    seen, job = rates(throughput=RackThroughput(2), watch="loss", scaling_rule="linear")
    assert job.complete
    assert min(seen) == pytest.approx(0.1)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(DocumentError, match="no method `factor`"):
        rates(scaling_rule=3)
