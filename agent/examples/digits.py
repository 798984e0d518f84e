"""Train a small convolutional network on scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels).

Run it alone, on as many processes as you like, or submit it to Pollux; the script stays the same:

    python agent/examples/digits.py --epochs 15
    torchrun --nproc-per-node 2 agent/examples/digits.py --epochs 15

The lines marked (1) to (5) are all that differs from an ordinary PyTorch loop. With the defaults it reaches a
validation accuracy of at least 0.97.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pollux_agent.torch as pollux  # (1)

VALIDATION_IMAGES = 360


def convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """With batch normalisation training stands the high learning rates of large batches."""
    return (
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class Net(nn.Module):
    """Few parameters and much arithmetic: replicas compute for long and have little to average."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Upsample(scale_factor=3),
            *convolution(1, width),
            *convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *convolution(2 * width, 2 * width),
            nn.MaxPool2d(2),
            *convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Dropout(0.5), nn.Linear(4 * width * 9, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """(training set, validation set), split the same way every time."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:VALIDATION_IMAGES], order[VALIDATION_IMAGES:]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(images[held_out], labels[held_out])


def decay(epoch: float) -> float:
    """Multiplier of the learning rate after ``epoch`` epochs' worth of progress, at whatever batch size."""
    return 1 / (1 + epoch / 4)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Share of ``data`` that the model classifies correctly."""
    model.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    correct = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15, help="statistical epochs (default %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="M0, the batch size that --lr is for (default %(default)s)"
    )
    parser.add_argument(
        "--max-local-batch-size", type=int, default=256, help="what fits into one GPU's memory"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate at M0 (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=24, help="channels of the first layer (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", help="keep checkpoints here when run alone")
    arguments = parser.parse_args()

    device = pollux.default_device()  # (2) this process's GPU, or the CPU
    torch.manual_seed(arguments.seed)
    train_set, validation_set = load_data()
    model = Net(arguments.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=1e-4)

    job = pollux.ElasticJob(  # (3) joins the other replicas, and goes on from the last checkpoint
        model,
        optimizer,
        train_set,
        batch_size=arguments.batch_size,
        max_local_batch_size=arguments.max_local_batch_size,
        scaling_rule="adascale",
        lr_schedule=decay,
        seed=arguments.seed,
        checkpoint_dir=arguments.checkpoint_dir,
    )

    for epoch in job.epochs(arguments.epochs):  # (4) as many passes as that much progress takes
        for images, labels in job.loader:  # (5) batches of the size that trains fastest
            optimizer.zero_grad()
            loss = F.cross_entropy(job.model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        score = accuracy(model, validation_set, device)
        job.log(val_accuracy=score)
        if job.rank == 0:
            print(
                f"pass {epoch}: validation accuracy {score:.4f}, batch size {job.batch_size}, "
                f"{job.statistical_epoch:.2f} epochs' worth of progress",
                flush=True,
            )


if __name__ == "__main__":
    main()
