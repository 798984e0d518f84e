"""Stopped behind any step, a script that uses its loop's variables after the loop goes on without a fault."""

import os
import sys
from pathlib import Path

import pytest
from forked import forked

NUM_PASSES, STEPS_A_PASS = 3, 2

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import pollux_agent.torch as pollux

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
job = pollux.ElasticJob(
    model,
    optimizer,
    data,
    batch_size=32,
    max_local_batch_size=32,
    max_batch_size=32,
    checkpoint_dir=sys.argv[1],
)
for epoch in job.epochs(int(sys.argv[2])):
    for inputs, targets in job.loader:
        if job.step + 1 == int(sys.argv[3]):
            job.stop()
        optimizer.zero_grad()
        loss = F.cross_entropy(job.model(inputs), targets)
        loss.backward()
        optimizer.step()
    print("pass", epoch, "ends at step", job.step, "with a loss of", loss.item())
"""


def script(output: str, *arguments: str) -> None:
    """As ``python -c SCRIPT arguments``, with all that it prints in ``output``."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["-c", *arguments]
    exec(compile(SCRIPT, "<script>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("stop_at", range(1, NUM_PASSES * STEPS_A_PASS + 1))
def test_what_stands_behind_the_loop_of_a_pass_is_done_once_and_finds_its_variables(
    tmp_path: Path, stop_at: int
) -> None:
    def run(stop_at: int) -> tuple[int | None, list[str]]:
        output = tmp_path / "output"
        arguments = (str(output), str(tmp_path / "kept"), str(NUM_PASSES), str(stop_at))
        process = forked().Process(target=script, args=arguments)
        process.start()
        process.join(120)
        process.kill()
        printed = output.read_text()
        assert "Traceback" not in printed, printed
        passes = [line.split(" with ")[0] for line in printed.splitlines() if line.startswith("pass ")]
        return process.exitcode, passes

    last = stop_at == NUM_PASSES * STEPS_A_PASS
    status, before = run(stop_at)
    assert status == (0 if last else 143)
    status, after = run(0)
    assert status == 0
    assert before + after == [
        f"pass {number} ends at step {STEPS_A_PASS * (number + 1)}" for number in range(NUM_PASSES)
    ]
