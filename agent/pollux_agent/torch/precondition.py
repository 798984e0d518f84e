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

from pollux_agent.errors import DocumentError
from pollux_agent.torch.flat import dot, wide

_log = logging.getLogger(__name__)


SETTLED_STEPS = 10
"""Steps of an optimizer from which on its P is used.

P = 1 / sqrt(v), and v is a mean of n squares: of Gaussian ones E[P^2] is finite from n = 3 on and its
variance from n = 5, and at n = 10 it is a quarter too large. From one or two gradients a few elements would
weigh more than all the others, in an average that takes hundreds of steps to forget it.
"""


class Preconditioner(Protocol):
    """How one class of optimizer scales gradients; give one for an optimizer that is not known here."""

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """The diagonal of P for each of ``params``, all of the parameter group ``group``.

        Each tensor has its parameter's shape, or a shape that broadcasts to it. None means P = I. Only
        called with parameters that have made SETTLED_STEPS steps, unless :attr:`needs_state` is false.
        """
        ...

    @property
    def needs_state(self) -> bool:
        """Whether P is unknown until the optimizer has made some steps."""
        ...


class Identity:
    """P = I."""

    needs_state = False

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        return None


class Adam:
    """P = 1 / (sqrt(v / (1 - beta2^t)) + eps), Kingma and Ba 2015, algorithm 1; AdamW and NAdam alike.

    v is taken as it will be once an average square has entered it, see :func:`_entered`.
    """

    needs_state = True

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        states = [optimizer.state[param] for param in params]
        moment = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
        beta2 = float(group["betas"][1])
        steps = [float(state["step"]) for state in states]
        squares = [
            _entered(state[moment], keep=beta2, weight=1 - beta2**step)
            for state, step in zip(states, steps, strict=True)
        ]
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(roots, [(1 - beta2 ** (step + 1)) ** 0.5 for step in steps])
        return _reciprocal(roots, group["eps"])


class Adagrad:
    """P = 1 / (sqrt(sum of squares) + eps), Duchi et al. 2011."""

    needs_state = True

    def diagonal(
        self, optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> list[Tensor] | None:
        states = [optimizer.state[param] for param in params]
        squares = [_entered(state["sum"], keep=1.0, weight=float(state["step"])) for state in states]
        return _reciprocal(list(torch._foreach_sqrt(squares)), group["eps"])


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
        keep = float(group["alpha"])
        entered = [
            _entered(square, keep=keep, weight=1 - keep ** float(optimizer.state[param]["step"]))
            for square, param in zip(squares, params, strict=True)
        ]
        return _reciprocal(list(torch._foreach_sqrt(entered)), group["eps"])


def _entered(squares: Tensor, *, keep: float, weight: float) -> Tensor:
    """A moment of squares, whose weights add up to ``weight``, once one more has entered: the average of the
    parameter's.

    So an element that has seen next to no gradient (the embedding of a rare word, a pixel that is always
    black) is weighed as the optimizer will when it sees one, by a number that does not depend on that one;
    else its P of up to 1 / eps would outweigh all others.
    """
    entering = (1.0 - keep) if keep < 1.0 else 1.0
    return torch.add(squares.sum() * (entering / (weight * squares.numel())), squares, alpha=keep)


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
        "Give one to the job with preconditioners={%s: ...}",
        type(optimizer).__name__,
        type(optimizer).__name__,
    )
    return Identity()


def diagonals(
    optimizer: Optimizer, precondition: Preconditioner, group: Mapping[str, Any], params: Sequence[Tensor]
) -> Mapping[Tensor, Tensor | None]:
    """The diagonal of P by parameter, for those of ``params`` whose P is known; None means P = I.

    Raises DocumentError where the preconditioner does not give one diagonal a parameter.
    """
    known = [param for param in params if not precondition.needs_state or _has_settled(optimizer, param)]
    if not known:
        return {}
    found = precondition.diagonal(optimizer, group, known)
    if found is None:
        return dict.fromkeys(known)
    if len(found) != len(known):
        raise DocumentError(
            f"preconditioners: {type(precondition).__name__} gave {len(found)} diagonals for {len(known)} "
            "parameters; give one for each of those it is asked for"
        )
    return dict(zip(known, found, strict=True))


def spread(diagonal: Tensor, shape: torch.Size) -> Tensor:
    """A diagonal over all elements of its parameter; raises DocumentError if it does not broadcast to it."""
    try:
        return diagonal.expand(shape)
    except RuntimeError:
        raise DocumentError(
            f"preconditioners: a diagonal has shape {tuple(diagonal.shape)}, its parameter {tuple(shape)}; "
            "give one of the parameter's shape, or that broadcasts to it"
        ) from None


def check_preconditioners(given: Mapping[type[Optimizer], Preconditioner] | None) -> None:
    """Raise DocumentError for what is no mapping from classes of optimizers to preconditioners."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise DocumentError(
            f"preconditioners: {given!r} is no mapping; give {{an optimizer's class: its preconditioner}}"
        )
    for kind, each in given.items():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise DocumentError(f"preconditioners: the key {kind!r} is no class of optimizers; give one")
        where = f"preconditioners[{kind.__name__}]"
        if isinstance(each, type):
            raise DocumentError(f"{where}: {each.__name__} is a class; give an object, {each.__name__}()")
        if not callable(getattr(each, "diagonal", None)):
            raise DocumentError(f"{where}: {each!r} has no method `diagonal`; give it one")
        if not isinstance(getattr(each, "needs_state", None), bool):
            raise DocumentError(
                f"{where}: {each!r} has no `needs_state`; give it one, True where P is unknown before a step"
            )


class Metric:
    """Squared norms of gradients as P weighs them, |P x|^2, with P as it was when this was made.

    Gradients are flat: ``groups`` lists the numbers of the parameters in each flat tensor, in order.
    Parameters whose P is not known yet are left out: they weigh 0.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        optimizers: Sequence[tuple[Optimizer, Preconditioner]],
        groups: Sequence[Sequence[int]],
    ) -> None:
        number = {param: index for index, param in enumerate(params)}
        found: dict[int, Tensor | None] = {}
        for optimizer, precondition in optimizers:
            for group in optimizer.param_groups:
                own = [param for param in group["params"] if param in number]
                for param, diagonal in diagonals(optimizer, precondition, group, own).items():
                    found[number[param]] = diagonal
        self.known = bool(found)
        """Whether any parameter's P is known."""
        self._params, self._groups = params, groups
        self._scales = [_scale([params[number] for number in group], group, found) for group in groups]
        self._room: dict[int, Tensor] = {}

    def fits(self, params: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> bool:
        """Whether it was made for these very parameters, laid out like this."""
        return params is self._params and groups == self._groups

    def weigh(self, group: int, flat: Tensor) -> None:
        """Make P x of one group's x in place."""
        scale = self._scales[group]
        if scale is not None:
            flat.mul_(scale)

    def weighed(self, group: int, flat: Tensor) -> Tensor:
        """P x of one group, until it is asked for the next one of that group.

        On a CPU it stays in one place: there the first touch of new memory takes longer than the product.
        """
        scale = self._scales[group]
        if scale is None:
            return flat
        if scale.device.type != "cpu":
            return flat * scale
        if group not in self._room:
            self._room[group] = torch.empty_like(scale)
        return torch.mul(flat, scale, out=self._room[group])

    def sqr(self, group: int, flat: Tensor) -> Tensor:
        """|P x|^2 over one group, as one number on its device."""
        weighed = self.weighed(group, flat)
        return dot(weighed, weighed)

    def norm(self, flats: Sequence[Tensor]) -> Tensor:
        """|P x|^2 over all groups."""
        return total([self.sqr(group, flat) for group, flat in enumerate(flats)])


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of numbers that may be on several devices, on the first one's."""
    return parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _scale(
    params: Sequence[Tensor], numbers: Sequence[int], diagonals: Mapping[int, Tensor | None]
) -> Tensor | None:
    """P of the parameters as one flat tensor, None where P = I for all; 0 where it is not known."""
    if all(number in diagonals and diagonals[number] is None for number in numbers):
        return None
    parts = []
    for number, param in zip(numbers, params, strict=True):
        dtype = wide(param.dtype)
        diagonal = diagonals.get(number)
        if diagonal is None:
            diagonal = torch.full((), float(number in diagonals), dtype=dtype, device=param.device)
        parts.append(spread(diagonal.to(dtype), param.shape).reshape(-1))
    return torch.cat(parts)


def _has_settled(optimizer: Optimizer, param: Tensor) -> bool:
    """Whether P may weigh gradients. Optimizers that do not count their steps are taken at their word."""
    state = optimizer.state.get(param) or {}
    return bool(state) and float(state.get("step", SETTLED_STEPS)) >= SETTLED_STEPS
