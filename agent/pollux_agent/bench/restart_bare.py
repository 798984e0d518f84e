"""What any elastic training must do again at a restart: ``torchrun restart_bare.py EXAMPLE ANSWER [GROUP]``.

Enters the CPU quota GROUP as a worker of ours does, once torch is there, imports what the digits example
imports, joins the other ranks, makes model, optimizer and data as it does, and trains one step with torch
alone. Rank 0 then writes the time into the file ANSWER.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main(example: Path, answer: Path, group: Path | None) -> None:
    """Train one step."""
    if group is not None:
        group.write_text(str(os.getpid()))
    spec = importlib.util.spec_from_file_location("example", example)
    if spec is None or spec.loader is None:
        raise SystemExit(f"EXAMPLE: {str(example)!r} is no Python file")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, _ = module.load_data()
    model = nn.parallel.DistributedDataParallel(module.Net(24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch_size = 32 // distributed.get_world_size()
    images, labels = next(iter(DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set))))
    loss = F.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if distributed.get_rank() == 0:
        answer.write_text(str(time.time()))
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
