"""Train a small causal transformer, byte by byte, on the source text of modules that ship with Python.

Run it alone, on as many processes as you like, or submit it to Pollux; the script stays the same:

    python agent/examples/language_model.py --epochs 6
    torchrun --nproc-per-node 2 agent/examples/language_model.py --epochs 6

The lines marked (1) to (5) are all that differs from an ordinary PyTorch loop. With the defaults it reaches a
validation loss below 1.8 nats a byte; guessing bytes by their frequency alone gives 3.1.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import pollux_agent.torch as pollux  # (1)

MODULES = ("argparse", "ast", "dataclasses", "difflib", "heapq", "inspect", "textwrap")
VOCABULARY = 128
VALIDATION_SHARE = 0.1


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text of ``length`` bytes, each with the bytes that follow."""

    def __init__(self, pieces: Tensor) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pieces[index, :-1], self.pieces[index, 1:]


class Transformer(nn.Module):
    """Embeddings, ``num_layers`` pre-norm encoder layers under a causal mask, and a linear head."""

    def __init__(self, length: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of each next byte, shape (samples, length, VOCABULARY)."""
        return self.head(self.layers(self.bytes(inputs) + self.places, mask=self.mask, is_causal=True))


def load_data(length: int) -> tuple[Windows, Windows]:
    """(training set, validation set) of windows of ``length`` bytes, split the same way every time."""
    text = bytearray()
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"the source of Python's module {name!r} is not installed")
        text += Path(spec.origin).read_bytes()
    data = torch.frombuffer(text, dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
    pieces = data.unfold(0, length + 1, length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    held_out = int(VALIDATION_SHARE * len(pieces))
    return Windows(pieces[order[held_out:]]), Windows(pieces[order[:held_out]])


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, device: torch.device) -> float:
    """Mean loss over ``data``."""
    model.eval()
    pieces = data.pieces.to(device).split(64)
    total = sum(loss_of(model, piece[:, :-1], piece[:, 1:]).item() * len(piece) for piece in pieces)
    model.train()
    return total / len(data)


def warm_up(epoch: float) -> float:
    """Multiplier of the learning rate after ``epoch`` epochs' worth of progress, at whatever batch size."""
    return min(1.0, 0.05 + 4 * epoch) / (1 + epoch / 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer on the source text of Python.")
    parser.add_argument("--epochs", type=int, default=6, help="statistical epochs (default %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="M0, the batch size that --lr is for (default %(default)s)"
    )
    parser.add_argument(
        "--max-local-batch-size", type=int, default=64, help="what fits into one GPU's memory"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate at M0 (default %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes in a window (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="size of an embedding (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", help="keep checkpoints here when run alone")
    arguments = parser.parse_args()

    device = pollux.default_device()  # (2) this process's GPU, or the CPU
    torch.manual_seed(arguments.seed)
    train_set, validation_set = load_data(arguments.length)
    model = Transformer(arguments.length, arguments.width, arguments.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    job = pollux.ElasticJob(  # (3) joins the other replicas, and goes on from the last checkpoint
        model,
        optimizer,
        train_set,
        batch_size=arguments.batch_size,
        max_local_batch_size=arguments.max_local_batch_size,
        scaling_rule="sqrt",
        lr_schedule=warm_up,
        seed=arguments.seed,
        checkpoint_dir=arguments.checkpoint_dir,
    )

    for epoch in job.epochs(arguments.epochs):  # (4) as many passes as that much progress takes
        for inputs, targets in job.loader:  # (5) batches of the size that trains fastest
            optimizer.zero_grad()
            loss = loss_of(job.model, inputs.to(device), targets.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score = evaluate(model, validation_set, device)
        job.log(val_loss=score)
        if job.rank == 0:
            print(
                f"pass {epoch}: validation loss {score:.4f}, batch size {job.batch_size}, "
                f"{job.statistical_epoch:.2f} epochs' worth of progress",
                flush=True,
            )


if __name__ == "__main__":
    main()
