"""Gradients and noise of a sharded model: FSDP2's ``fully_shard``, whose gradients appear already averaged.

The weights n / N of uneven micro-batches, and the local norms that the noise scale needs, are taken where the
local gradients still exist: in the reduce-scatter. On a step that is measured the shards of all ranks' own
gradients are exchanged by an all-to-all, as many bytes as the reduce-scatter moves, and summed where they
arrive; P, which is sharded like the parameters, is at hand there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pollux_agent.errors import DocumentError, LoopError
from pollux_agent.settings import worker_settings
from pollux_agent.torch.agreement import running_statistics
from pollux_agent.torch.gradients import StepResult
from pollux_agent.torch.noise import NoiseSample, NoiseScale
from pollux_agent.torch.precondition import Preconditioner, diagonals, preconditioner, spread
from pollux_agent.torch.world import default_device, join_world

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WARM_UP_ESTIMATES = 20
"""So many first estimates come from consecutive steps."""


def join() -> torch.device:
    """Join the other replicas before a model is sharded over them, also where there are none; this process's
    device.
    """
    device = default_device()
    join_world(worker_settings(), device, group_of_one=True)
    return device


class ShardedSync:
    """What :class:`pollux_agent.torch.gradients.GradientSync` is, for a model under ``fully_shard``.

    Noise is measured on every step until there are 20 estimates, then on every ``sample_every``-th, where a
    step has several micro-batches over ranks and accumulation. Raises DocumentError for parameters that are
    not sharded, and for hybrid sharding.
    """

    scaler_stepped = False

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        sample_every: int = 10,
        preconditioners: Mapping[type[Optimizer], Preconditioner] | None = None,
    ) -> None:
        self.module = model
        self.noise = NoiseScale()
        self._optimizers = [(each, preconditioner(each, preconditioners)) for each in optimizers]
        self._sample_every = max(1, sample_every)
        self._params = [param for param in model.parameters() if param.requires_grad]
        _check(self._params)
        self._world_size = dist.get_world_size()
        self._statistics = running_statistics(model)
        self._sums: dict[Tensor, Tensor] = {}
        self._scatters = [_Scatter(each, self) for each in model.modules() if isinstance(each, FSDPModule)]
        model.register_forward_hook(self._after_forward)
        self._step = 0
        self._step_samples = self._micro_batches = self._num_samples = 0
        self._last = self._in_micro_batch = self._finished = self.measures = False
        self.weight = 1.0
        self.factors: list[float] = []
        self.weighted: Tensor | float = 0.0
        self.whole = True
        self._count = 0
        self._diagonals: dict[Tensor, Tensor | None] = {}
        self._mean_sqr: tuple[Tensor, Tensor]
        self._stop_asked: Callable[[], bool] = bool
        self._result: StepResult | None = None

    def start_step(self, *, micro_batches: int, step_samples: int) -> None:
        """Begin an optimizer step of ``micro_batches`` on every rank and ``step_samples`` samples in all."""
        if micro_batches < 1 or step_samples < 1:
            raise LoopError(
                f"a step needs at least one micro-batch and one sample (got micro_batches={micro_batches}, "
                f"step_samples={step_samples})"
            )
        self.abandon_step()
        self._step_samples, self._micro_batches = step_samples, micro_batches
        self._result, self._finished = None, False
        self._count, self.weighted, self.whole = 0, 0.0, True
        due = self.noise.count < WARM_UP_ESTIMATES or self._step % self._sample_every == 0
        self.measures = due and micro_batches * self._world_size > 1
        self._diagonals = {}
        if self.measures:
            for optimizer, precondition in self._optimizers:
                self._diagonals |= _shards_of_p(optimizer, precondition)
            self.measures = all(param in self._diagonals for param in self._params)

    def start_micro_batch(self, *, num_samples: int, last: bool, stop: Callable[[], bool] = bool) -> None:
        """Before forward: this rank's micro-batch holds ``num_samples`` real samples; 0: none that counts."""
        self._num_samples, self._last, self._in_micro_batch = num_samples, last, True
        self._stop_asked = stop
        self.weight = num_samples / self._step_samples
        if self.measures:
            self._count += num_samples > 0
            counts = torch.zeros(self._world_size, device=self._device)
            counts[dist.get_rank()] = num_samples
            dist.all_reduce(counts)
            self.factors = [self._step_samples**2 / count if count else 0.0 for count in counts.tolist()]

    def finish_step(self, *, stop: bool = False) -> StepResult:
        """Before the real optimizer step: one small all-reduce of what ranks must agree on."""
        if self._result is not None:
            return self._result
        if not self._step_samples:
            raise LoopError("a step was finished that never began; take batches from the elastic loader")
        self._in_micro_batch = False
        finite, stops, sample = self._agree(stop or self._stop_asked())
        if finite:
            if sample is not None:
                self.noise.update(sample)
            self._step += 1
        noise = self.noise
        self._result = StepResult(
            skip=not finite,
            stop=stops,
            noise_scale=noise.noise_scale,
            grad_sqr=noise.grad_sqr,
            grad_var=noise.grad_var,
        )
        return self._result

    def abandon_step(self) -> None:
        """Drop the step in progress: backward passes from here on are the script's own."""
        self._in_micro_batch = self.measures = False
        self.weight = 1.0 / self._world_size
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"step": self._step, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self._step = int(state["step"])
        self.noise.load_state_dict(state["noise"])
        self.abandon_step()

    def diagonal(self, param: Tensor) -> Tensor | None:
        """This rank's shard of P for ``param``, None for P = I."""
        return self._diagonals[param]

    @property
    def _device(self) -> torch.device:
        return _local(self._params[0]).device

    @torch.no_grad()
    def _agree(self, stop: bool) -> tuple[bool, bool, NoiseSample | None]:
        """Whether the gradient is finite everywhere, whether any rank asks to stop, the step's figures."""
        if not self._finished:
            self._mean_sqr = self._squared_norm(), self._squared_norm(scaled=self.measures)
        plain, scaled = self._mean_sqr
        bad = (~plain.isfinite()).double()
        numbers = [float(stop), float(self._count), float(not self.whole), float(self.weighted)]
        message = torch.cat([bad[None], torch.tensor(numbers, dtype=torch.float64).to(bad.device)])
        message = torch.cat([message, scaled[None]])
        dist.all_reduce(message)
        for statistic in self._statistics:
            dist.all_reduce(statistic)
            statistic.div_(self._world_size)
        any_bad, any_stop, count, partly, weighted, mean_sqr = message.tolist()
        sample = None
        if self.measures and count >= 2 and not partly:
            sample = NoiseSample(
                num_estimates=round(count),
                num_samples=self._step_samples,
                weighted_sqr_sum=weighted,
                mean_sqr=mean_sqr,
            )
        return any_bad == 0, any_stop > 0, sample

    def _squared_norm(self, *, scaled: bool = False) -> Tensor:
        """|g|^2 of this rank's shards, or |P g|^2 where that is measured."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for param in self._params:
            if param.grad is not None:
                gradient = _local(param.grad).double()
                diagonal = self._diagonals.get(param) if scaled else None
                total += (gradient if diagonal is None else gradient * diagonal).square().sum()
        return total

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Be called at the end of the backward that begins at ``output``, behind FSDP's own callback."""
        if not self._in_micro_batch or not torch.is_grad_enabled():
            return
        first = next(
            (part for part in torch.utils._pytree.tree_leaves(output) if isinstance(part, Tensor)), None
        )
        if first is not None and first.requires_grad:
            first.register_hook(self._backward_began)  # type: ignore[no-untyped-call]

    def _backward_began(self, gradient: Tensor) -> None:
        if self._finished and self._last and self._in_micro_batch:
            raise LoopError(
                "a second backward pass reached the model after the step's gradient was averaged; add the "
                "losses and call backward once per batch"
            )
        Variable._execution_engine.queue_callback(self._backward_done)

    @torch.no_grad()
    def _backward_done(self) -> None:
        """Keep the gradients of a micro-batch back, and with the last one show their sum."""
        if not self._in_micro_batch:
            return
        if self._world_size == 1:
            self._weigh_alone()
        for param in self._params:
            gradient = param.grad
            kept = self._sums.pop(param, None)
            total = gradient if kept is None else kept if gradient is None else kept.add_(gradient)
            if self._last:
                param.grad = total
            else:
                param.grad = None
                if total is not None:
                    self._sums[param] = total
        if self._last:
            self._mean_sqr = self._squared_norm(), self._squared_norm(scaled=self.measures)
        self._finished = self._last

    def _weigh_alone(self) -> None:
        """What the reduce-scatter does, where there is nobody to scatter to."""
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(self.weight)
        if self.measures and self.factors[0]:
            self.weighted = self.factors[0] * self._squared_norm(scaled=True) + self.weighted


class _Scatter(ReduceScatter):
    """The reduce-scatter of one FSDP module: weighs this rank's gradient, and measures if that is wanted."""

    def __init__(self, module: FSDPModule, sync: ShardedSync) -> None:
        self._sync = sync
        groups = module._get_fsdp_state()._fsdp_param_groups
        self._params = [each for group in groups for each in group.fsdp_params]
        if groups:
            module.set_custom_reduce_scatter(self)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        sync = self._sync
        if sync.weight != 1.0:
            input_tensor.mul_(sync.weight)
        if not sync.measures:
            _reduce_scatter(output_tensor, input_tensor, group=group)
            return None
        arrived = torch.empty_like(input_tensor)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        shards = arrived.view(group.size(), -1)
        torch.sum(shards, dim=0, out=output_tensor)
        diagonal = self._diagonal(shards)
        if diagonal is None:
            sync.whole = False
            return None
        for factor, shard in zip(sync.factors, shards, strict=True):
            if factor:
                sync.weighted = factor * (shard.double() * diagonal).square().sum() + sync.weighted
        return None

    def _diagonal(self, shards: Tensor) -> Tensor | None:
        """This rank's shard of P, as the buffer lies; None if some parameters have no gradient this time."""
        sizes = [each.padded_sharded_param_size.numel() for each in self._params]
        if sum(sizes) != shards.shape[1]:
            return None
        diagonal = torch.ones(sum(sizes), dtype=torch.float64, device=shards.device)
        for each, place in zip(self._params, torch.split(diagonal, sizes), strict=True):
            own = self._sync.diagonal(each.sharded_param)
            if own is not None:
                place[: own.numel()] = own.reshape(-1)
        return diagonal


def _shards_of_p(optimizer: Optimizer, precondition: Preconditioner) -> dict[Tensor, Tensor | None]:
    """This rank's shards of the diagonal of P; parameters whose P is not known yet are left out."""
    return {
        param: None if diagonal is None else spread(_local(diagonal), _local(param).shape)
        for group in optimizer.param_groups
        for param, diagonal in diagonals(optimizer, precondition, group, group["params"]).items()
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check(params: Sequence[Tensor]) -> None:
    if not params or not all(isinstance(param, DTensor) for param in params):
        raise DocumentError(
            "model: some of its parameters are not sharded; call fully_shard on the whole model last"
        )
    if any(isinstance(param, DTensor) and param.device_mesh.ndim > 1 for param in params):
        raise DocumentError(
            "model: it is sharded over a mesh of several dimensions; use one of one dimension"
        )
