"""The agent of a simulated job: what it measured in its own steps, the fit to it, and the batch it tunes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pollux_agent.model.fit import Observation, fit_throughput
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams

_MAX_NOISE = 1e18


@lru_cache(maxsize=100_000)
def _fit(profile: tuple[Observation, ...], prior: ThroughputParams | None) -> ThroughputParams | None:
    """Jobs of one application that went the same way have the same profile and share its fit."""
    return fit_throughput(profile, prior=prior)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What an earlier run of the same model hands on: fits by type, and the noise scale at its beginning.

    ``max_gpus``, and by type ``gpus_seen``, are the counts up to which the fits were measured. A job that
    knew the fits alone would see that no single doubling pays and stay small, where one without any grows.
    """

    fits: Mapping[str, ThroughputParams] = field(default_factory=dict)
    noise_scale: float | None = None
    max_gpus: int = 0
    gpus_seen: Mapping[str, int] = field(default_factory=dict)


class SimulatedAgent:
    """One job's agent. It is told about steps that were taken, and of nothing else."""

    def __init__(self, limits: Mapping[str, BatchLimits], earlier: Knowledge) -> None:
        self.noise_scale = earlier.noise_scale
        self.max_gpus = earlier.max_gpus
        self.gpus_seen = dict(earlier.gpus_seen)
        self._limits = limits
        self._earlier = earlier
        self._first_noise: float | None = None
        self._profile: dict[str, dict[tuple[int, int, int], Observation]] = {}
        self._fits: dict[str, ThroughputParams] | None = dict(earlier.fits)

    def measure_step(
        self, gpu_type: str, nodes: int, gpus: int, local_bsz: int, step_s: float, sync_s: float
    ) -> None:
        """A step on ``gpus`` of ``nodes``; only a configuration that was not seen before counts."""
        self.max_gpus = max(self.max_gpus, gpus)
        self._note(gpu_type, nodes, gpus, local_bsz, step_s, sync_s)

    def profile_alone(self, gpu_type: str, times: Mapping[int, tuple[float, float]]) -> None:
        """Steps on one GPU before the job's first start: (step_s, sync_s) by local batch size."""
        for local_bsz, (step_s, sync_s) in times.items():
            self._note(gpu_type, 1, 1, local_bsz, step_s, sync_s)

    def _note(
        self, gpu_type: str, nodes: int, gpus: int, local_bsz: int, step_s: float, sync_s: float
    ) -> None:
        seen = self._profile.setdefault(gpu_type, {})
        key = (nodes, gpus, local_bsz)
        if key in seen:
            return
        seen[key] = Observation(
            num_nodes=nodes,
            num_replicas=gpus,
            local_batch_size=local_bsz,
            optim_step_time_s=step_s,
            accum_step_time_s=step_s - sync_s,
        )
        self._fits = None
        self.gpus_seen[gpu_type] = max(self.gpus_seen.get(gpu_type, 0), gpus)

    def measure_noise(self, noise_scale: float) -> None:
        self.noise_scale = min(noise_scale, _MAX_NOISE)
        if self._first_noise is None:
            self._first_noise = self.noise_scale

    @property
    def fits(self) -> Mapping[str, ThroughputParams]:
        """Fitted parameters by type of GPU."""
        if self._fits is None:
            self._fits = dict(self._earlier.fits)
            for gpu_type, seen in self._profile.items():
                params = _fit(tuple(seen.values()), self._earlier.fits.get(gpu_type))
                if params is not None:
                    self._fits[gpu_type] = params
        return self._fits

    @property
    def knowledge(self) -> Knowledge:
        """What a later run of the same model can start from."""
        return Knowledge(
            fits=dict(self.fits),
            noise_scale=self._first_noise,
            max_gpus=self.max_gpus,
            gpus_seen=dict(self.gpus_seen),
        )

    def tune(self, gpu_type: str, nodes: int, gpus: int) -> tuple[int, int]:
        """(m, s) of the highest predicted goodput; the split of M0 before the first measurement."""
        params = self.fits.get(gpu_type)
        model = GoodputModel(params, self.noise_scale, self._limits[gpu_type])
        best = model.best(nodes, gpus)
        return int(best.local_batch_size), int(best.accumulation_steps)
