"""What the script gave as optimizers: whether those of a checkpoint fit, and which options it overrules."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Keys of a group that do not say what an update is, or stand for another one."""


def given(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Each optimizer's classes, its own first, and the options of its groups, as plain values."""
    return [
        {"classes": _classes(each), "groups": [_options(group) for group in each.param_groups]}
        for each in optimizers
    ]


def check_same(saved: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError where the optimizers of a checkpoint cannot be the script's: another number of them or
    of their groups, or another class. A class may be replaced by one that it is derived from, or the reverse.

    A checkpoint of an older agent names no classes.
    """
    states = saved["optimizers"]
    if len(states) != len(optimizers):
        raise ValueError(f"it has {len(states)} optimizers, the script {len(optimizers)}")
    named = saved.get("given") or [None] * len(states)
    for number, (optimizer, state, was) in enumerate(zip(optimizers, states, named, strict=True)):
        groups, own = len(state["param_groups"]), len(optimizer.param_groups)
        if groups != own:
            raise ValueError(f"its optimizer {number} has {groups} param_groups, the script's {own}")
        if was is None:
            continue
        before, now = was["classes"], _classes(optimizer)
        if before[0] not in now and now[0] not in before:
            raise ValueError(_another(before[0], optimizer))


def needed(optimizers: Sequence[Optimizer]) -> list[list[set[str]]]:
    """The names of the options that each optimizer's groups have of its class."""
    return [[each.defaults.keys() & group.keys() for group in each.param_groups] for each in optimizers]


def check_whole(optimizers: Sequence[Optimizer], names: Sequence[Sequence[set[str]]]) -> None:
    """Raise ValueError where a group lacks options that it :func:`needed` once a checkpoint's are loaded."""
    for optimizer, own in zip(optimizers, names, strict=True):
        for group, wanted in zip(optimizer.param_groups, own, strict=True):
            lacking = sorted(wanted - group.keys())
            if lacking:
                raise ValueError(f"{_another('another class', optimizer)} (it has no {', '.join(lacking)})")


def overruled(
    first: Sequence[Mapping[str, Any]],
    script: Sequence[Mapping[str, Any]],
    loaded: Sequence[Mapping[str, Any]],
) -> list[str]:
    """The options, in words, that the ``script`` gives otherwise than at the ``first`` start of its training,
    and otherwise than they are with the checkpoint ``loaded``; all three as :func:`given` has them.
    """
    said: list[str] = []
    for number, optimizer in enumerate(script):
        for place, own in enumerate(optimizer["groups"]):
            before, now = (each[number]["groups"][place] for each in (first, loaded))
            several = len(script) > 1 or len(optimizer["groups"]) > 1
            where = f" (optimizer {number}, group {place})" if several else ""
            said += [
                f"{name} {now[name]!r} instead of the script's {value!r}{where}"
                for name, value in own.items()
                if name in before and name in now and value not in (before[name], now[name])
            ]
    return said


def _another(name: str, optimizer: Optimizer) -> str:
    own = type(optimizer).__name__
    return (
        f"its optimizer is a {name}, the script's a {own}; go on with what it was, or start the {own} afresh "
        "with another place for checkpoints"
    )


def _classes(optimizer: Optimizer) -> list[str]:
    line = type(optimizer).__mro__
    return [each.__name__ for each in line[: line.index(Optimizer)]]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options; its learning rate is the one that schedulers start from, where there are any."""
    options = {name: _plain(value) for name, value in group.items() if name not in _HOW}
    if "initial_lr" in group:
        options["lr"] = _plain(group["initial_lr"])
    return {name: value for name, value in options.items() if value is not None}


def _plain(value: object) -> Any:
    """Numbers, and tuples of them; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, bool | str):
        return value
    return float(value) if isinstance(value, int | float) else None
