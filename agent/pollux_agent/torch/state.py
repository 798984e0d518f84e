"""What a checkpoint holds besides model and optimizer, as tensors and plain values."""

import io
import pickle
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from pollux_agent.errors import DocumentError
from pollux_agent.torch.checkpoint import read_state


class Stateful(Protocol):
    """Anything that can be checkpointed: a learning-rate scheduler, a moving average, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random number generators of Python, numpy and torch."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators where :func:`rng_state` found them."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def check_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Raise DocumentError for an object whose state a checkpoint could not give back."""
    for name, item in stateful.items():
        buffer = io.BytesIO()
        try:
            torch.save(item.state_dict(), buffer)
            buffer.seek(0)
            read_state(buffer)
        except (pickle.PickleError, RuntimeError, TypeError, AttributeError) as error:
            raise DocumentError(
                f"stateful[{name!r}]: its state_dict() holds more than tensors and plain values, which is "
                f"not safe to load again; leave the rest out ({type(error).__name__}: {error})"
            ) from error
