"""What the arguments of an ElasticJob must be: one table, and an error that names argument, value and fix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pollux_agent.errors import DocumentError


@dataclass(frozen=True, slots=True)
class _Must:
    """``be``: of which kind. ``give``: the words for it. ``hold``: what its value has to be besides."""

    be: Callable[[Any], bool]
    give: str
    hold: Callable[[Any], bool] = lambda _: True


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or kind(value)


def _some(kind: type) -> Callable[[Any], bool]:
    """One of a kind, or a sequence of them."""
    return lambda value: (
        isinstance(value, kind)
        or (isinstance(value, Sequence) and all(isinstance(each, kind) for each in value))
    )


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or value >= least


def _count(least: int, *, optional: bool = False) -> _Must:
    none = ", or None" if optional else ""
    return _Must(
        _or_none(_whole) if optional else _whole, f"a whole number from {least} on{none}", _at_least(least)
    )


def _text(value: object) -> bool:
    return isinstance(value, str)


def _filled(value: object) -> bool:
    return value != ""


_MOST_WORKERS = 1024
_MOST_MULTIPLIER = torch.finfo(torch.float32).max
_FUNCTION = _Must(_or_none(callable), "a function, or None")
_RULES: Mapping[str, _Must] = MappingProxyType(
    {
        "model": _Must(lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
        "optimizer": _Must(
            _some(Optimizer),
            "the torch.optim.Optimizer that the loop steps, or a list of them, each once",
            lambda value: not isinstance(value, Sequence) or 0 < len(value) == len(set(map(id, value))),
        ),
        "batch_size": _Must(_whole, "a whole number of samples, from 1 on"),
        "max_batch_size": _Must(_or_none(_whole), "a whole number of samples, or None"),
        "max_local_batch_size": _Must(_or_none(_whole), "a whole number of samples, or None"),
        "min_local_batch_size": _Must(_or_none(_whole), "a whole number of samples, or None"),
        "num_samples": _Must(_or_none(_whole), "a whole number of samples, or None"),
        "noise_every": _count(1),
        "num_workers": _Must(
            _whole,
            f"a whole number of processes from 0 to {_MOST_WORKERS}",
            lambda value: 0 <= value <= _MOST_WORKERS,
        ),
        "pin_memory": _Must(lambda value: isinstance(value, bool), "True or False"),
        "seed": _count(0),
        "watch": _Must(_or_none(_text), "the name of a figure that the script logs, or None", _filled),
        "mlflow_tracking_uri": _Must(_or_none(_text), "MLflow's address, or None"),
        "checkpoint_dir": _Must(
            _or_none(lambda value: isinstance(value, str | Path)),
            "a folder or a URL (str or Path), or None",
            _filled,
        ),
        "lr_schedule": _Must(_or_none(callable), "a function of the statistical epoch, or None"),
        "lr_scheduler": _Must(
            _some(LRScheduler),
            "a torch.optim.lr_scheduler that counts steps, or a list of them; a plain function of the "
            "statistical epoch goes in as lr_schedule",
        ),
        "grad_scaler": _Must(
            _or_none(
                lambda value: all(hasattr(value, name) for name in ("scale", "unscale_", "step", "update"))
            ),
            "the loop's torch.amp.GradScaler, or None",
        ),
        "collate_fn": _FUNCTION,
        "worker_init_fn": _FUNCTION,
        "stateful": _Must(
            _or_none(lambda value: isinstance(value, Mapping)),
            'a dict by names: stateful={"ema": ema}, or None',
            lambda value: all(isinstance(name, str) and name for name in value or ()),
        ),
    }
)


def check_arguments(**arguments: object) -> None:
    """Raise TypeError for an argument of a wrong kind, DocumentError for a value that it cannot have.

    What depends on several of them (batch sizes, the data set) is checked where they meet.
    """
    for name, value in arguments.items():
        must = _RULES[name]
        if not must.be(value):
            raise TypeError(f"{name} is {_told(value)}; give {must.give}")
        if not must.hold(value):
            raise DocumentError(f"{name} is {_told(value)}; give {must.give}")
    _check_trains(arguments.get("model"), arguments.get("optimizer"))
    schedulers = arguments.get("lr_scheduler")
    for each in schedulers if isinstance(schedulers, Sequence) else [schedulers]:
        if isinstance(each, ReduceLROnPlateau):
            raise TypeError(
                "lr_scheduler is a ReduceLROnPlateau, which counts no steps but waits for a figure; call its "
                "step(figure) yourself once a pass, and name it in stateful"
            )


def _check_trains(model: object, optimizer: Any) -> None:
    """Raise DocumentError where the optimizers know of none of the parameters that the model would train, and
    for complex ones."""
    if not isinstance(model, nn.Module):
        return
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    known = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
    trained = [param for param in model.parameters() if param.requires_grad]
    complex_ = next((name for name, param in model.named_parameters() if param.is_complex()), None)
    if complex_ is not None:
        raise DocumentError(
            f"model: its parameter {complex_} is complex, of which no noise scale is measured; keep it as a "
            "real parameter with one more dimension of 2, and use torch.view_as_complex(...) in forward"
        )
    if trained and known.isdisjoint(map(id, trained)):
        raise DocumentError(
            "optimizer is of other parameters than the model's, which would never change; make it from "
            "model.parameters(), behind all that replaces them (moving to a device, fully_shard)"
        )


def _told(value: object) -> str:
    """The value, or what it is where that would be long."""
    text = repr(value)
    if len(text) > 60 or isinstance(value, nn.Module | LRScheduler):
        return f"a {type(value).__name__}"
    return text


def checked_multiplier(multiplier: float, epoch: float) -> float:
    """What ``lr_schedule`` gave at ``epoch``; raises DocumentError for what no learning rate can be times."""
    try:
        right = 0 <= multiplier < _MOST_MULTIPLIER
    except TypeError:
        right = False
    if not right:
        raise DocumentError(
            f"lr_schedule gave {_told(multiplier)} at epoch {epoch:g}; it must give a finite number from 0 "
            "on, which float32 holds"
        )
    return multiplier
