"""The diagonal P by which an optimizer multiplies a gradient, read from its state.

Pollux section 3.1 measures gradients as the optimizer sees them: P = I for SGD, with or without momentum,
and 1 / (sqrt(v) + eps) for Adam and its kin. P is read before the step's own gradient enters the state, so
the two are independent.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

_log = logging.getLogger(__name__)


class Preconditioner(Protocol):
    """How one class of optimizer scales gradients; give one for an optimizer that is not known here."""

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """The diagonal of P for each of ``params``, all of the parameter group ``group``.

        Each tensor has its parameter's shape, or a shape that broadcasts to it. None means P = I. Only
        called with parameters that have state, unless :attr:`needs_state` is false.
        """
        ...

    @property
    def needs_state(self) -> bool:
        """Whether P is unknown until the optimizer has made a step."""
        ...


class Identity:
    """P = I."""

    needs_state = False

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        return None


class Adam:
    """P = 1 / (sqrt(v / (1 - beta2^t)) + eps), Kingma and Ba 2015, algorithm 1; AdamW and NAdam alike."""

    needs_state = True

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        states = [optimizer.state[param] for param in params]
        moment = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        roots = list(torch._foreach_sqrt([state[moment] for state in states]))
        _correct_bias(roots, float(group["betas"][1]), [state["step"] for state in states])
        return _reciprocal(roots, group["eps"])


class Adagrad:
    """P = 1 / (sqrt(sum of squares) + eps), Duchi et al. 2011."""

    needs_state = True

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        return _reciprocal(
            list(torch._foreach_sqrt([optimizer.state[param]["sum"] for param in params])), group["eps"]
        )


class RMSprop:
    """P = 1 / (sqrt(v) + eps), with v less the squared mean gradient where ``centered``."""

    needs_state = True

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        squares = [optimizer.state[param]["square_avg"] for param in params]
        if group.get("centered"):
            means = [optimizer.state[param]["grad_avg"] for param in params]
            squares = list(torch._foreach_sub(squares, torch._foreach_mul(means, means)))
            torch._foreach_clamp_min_(squares, 0.0)
        return _reciprocal(list(torch._foreach_sqrt(squares)), group["eps"])


def _correct_bias(roots: list[Tensor], beta2: float, steps: Sequence[Tensor | float]) -> None:
    """Divide each root by sqrt(1 - beta2^t), without waiting for a step count that is on a device."""
    if all(not isinstance(step, Tensor) or step.device.type == "cpu" for step in steps):
        counts = {float(step) for step in steps}
        if len(counts) == 1:
            torch._foreach_div_(roots, (1.0 - beta2 ** counts.pop()) ** 0.5)
            return
    corrections = [
        (1.0 - beta2 ** torch.as_tensor(step, dtype=root.dtype, device=root.device)).sqrt()
        for step, root in zip(steps, roots, strict=True)
    ]
    torch._foreach_div_(roots, corrections)


def _reciprocal(roots: list[Tensor], eps: float) -> list[Tensor]:
    torch._foreach_add_(roots, eps)
    torch._foreach_reciprocal_(roots)
    return roots


_KNOWN: Mapping[type[Optimizer], Callable[[], Preconditioner]] = {
    optim.SGD: Identity,
    optim.Adam: Adam,
    optim.AdamW: Adam,
    optim.NAdam: Adam,
    optim.Adagrad: Adagrad,
    optim.RMSprop: RMSprop,
}


def preconditioner(
    optimizer: Optimizer, custom: Mapping[type[Optimizer], Preconditioner] | None = None
) -> Preconditioner:
    """What to use for ``optimizer``: the nearest of its classes in ``custom``, then among those known.

    An optimizer that nobody knows is taken as P = I, with a warning.
    """
    for kind in type(optimizer).__mro__:
        if custom and kind in custom:
            return custom[kind]
        if kind in _KNOWN:
            return _KNOWN[kind]()
    _log.warning(
        "no preconditioner is known for %s; its noise scale is measured on plain gradients. "
        "Give one with preconditioners={%s: ...}",
        type(optimizer).__name__,
        type(optimizer).__name__,
    )
    return Identity()


class Metric:
    """The squared norm |P x|^2 of a gradient, with P as it was when this was made.

    Gradients are mappings from a parameter's number to its tensor; parameters left out count as zero, and
    those whose P is not known yet are left out of every norm.
    """

    def __init__(
        self, params: Sequence[Tensor], optimizers: Sequence[tuple[Optimizer, Preconditioner]]
    ) -> None:
        number = {param: index for index, param in enumerate(params)}
        self._device = params[0].device
        self._diagonal: dict[int, Tensor | None] = {}
        for optimizer, precondition in optimizers:
            for group in optimizer.param_groups:
                own = [param for param in group["params"] if param in number]
                if precondition.needs_state:
                    own = [param for param in own if _has_stepped(optimizer, param)]
                if not own:
                    continue
                diagonal = precondition.diagonal(optimizer, group, own)
                for place, param in enumerate(own):
                    self._diagonal[number[param]] = diagonal[place] if diagonal is not None else None

    @property
    def known(self) -> bool:
        """Whether any parameter's P is known."""
        return bool(self._diagonal)

    def squared_norm(self, gradient: Mapping[int, Tensor]) -> Tensor:
        """|P x|^2 as a number on the gradient's device, float64 where the device has it."""
        plain, scaled, scales = [], [], []
        for index, part in gradient.items():
            if index not in self._diagonal:
                continue
            scale = self._diagonal[index]
            if scale is None:
                plain.append(part)
            else:
                scaled.append(part)
                scales.append(scale)
        if scaled:
            plain += torch._foreach_mul(scaled, scales)
        return squared_norm(plain, self._device)


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all of ``tensors`` (any shapes, floating point) as one number on ``device``.

    It is float64 where the device has that.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    wide = [part if part.dtype in (torch.float32, torch.float64) else part.float() for part in tensors]
    norms = torch._foreach_norm(wide)
    if any(norm.dtype != norms[0].dtype or norm.device != device for norm in norms):
        norms = tuple(norm.to(device, dtype) for norm in norms)
    return torch.stack(norms).to(dtype).square().sum()


def _has_stepped(optimizer: Optimizer, param: Tensor) -> bool:
    """Adagrad makes its state before the first step, with a count of 0."""
    state = optimizer.state.get(param)
    if not state:
        return False
    step = state.get("step", 1)
    return not (isinstance(step, Tensor) and step.device.type == "cpu") or float(step) > 0
