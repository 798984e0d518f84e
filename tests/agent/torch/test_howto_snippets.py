"""Code of how-tos runs as it stands there; ``...`` is the job's plain arguments, or the plain loop body."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import pollux_agent.torch as pollux
from pollux_agent.torch import training

HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to"
PLAIN = "(model, optimizer, train_set, batch_size=32, "


def blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (HOW_TO / document).read_text(), re.DOTALL | re.MULTILINE)


def namespace(epochs: int) -> dict[str, Any]:
    """What the snippets take for granted."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 3)
    train_set = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(job: pollux.ElasticJob, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        (own,) = job._trained.optimizers
        own.zero_grad()
        functional.cross_entropy(job.model(inputs), targets).backward()
        own.step()

    return {
        "torch": torch,
        "pollux": pollux,
        "model": model,
        "optimizer": optimizer,
        "train_set": train_set,
        "epochs": epochs,
        "loss": torch.tensor(1.0),
        "step": step,
    }


def run(block: str, epochs: int) -> dict[str, Any]:
    names = namespace(epochs)
    lines = block.replace("(..., ", PLAIN).splitlines()
    lines = [
        line.replace("...", "step(job, inputs, targets)" if line[0] == " " else "") for line in lines if line
    ]
    exec("\n".join(lines), names)
    return names


@pytest.mark.parametrize(
    "block", blocks("replace-parts-of-the-agent.md"), ids=lambda block: block.split("\n")[0]
)
def test_replacing_a_part_works_as_it_is_written(block: str, caplog: pytest.LogCaptureFixture) -> None:
    names = run(block, 2)
    job = names["job"]
    for _ in job.epochs(2):
        for inputs, targets in job.loader:
            names["step"](job, inputs, targets)
            job.log(loss=1.0)
    assert job.complete
    assert job._trained.sync.noise.noise_scale is not None
    assert not caplog.records, "a part as it is advised gives no warning"


def test_a_schedule_over_epochs_as_it_is_advised_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is worth half of one at M0, so 6 epochs take 12 passes."""
    monkeypatch.setattr(training, "progress_of_step", lambda *_, batch_size, **__: batch_size / 32 / 2)
    (block,) = [each for each in blocks("make-your-script-elastic.md") if "CosineAnnealingLR" in each]
    names = run(block, 6)
    assert names["job"]._position.epoch + 1 == 12
    assert names["scheduler"].last_epoch == 6
    assert names["scheduler"].get_last_lr() == pytest.approx([0.0])
