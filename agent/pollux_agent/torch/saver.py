"""Gathers the whole state of a job into a checkpoint, and gives it back to the objects that it came from."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pollux_agent.errors import CheckpointError
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.given import check_same, check_whole, given, needed, overruled
from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.history import History
from pollux_agent.torch.profile import Profile
from pollux_agent.torch.sampler import Position
from pollux_agent.torch.state import Stateful, load_rng_state, rng_state
from pollux_agent.torch.world import World

logger = logging.getLogger(__name__)

SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class Trained:
    """Everything that a checkpoint holds; ``profiles`` and ``fits`` are by GPU type."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    sync: GradientSync
    sampler: Position
    history: History
    stateful: Mapping[str, Stateful]
    profiles: dict[str, Profile] = field(default_factory=dict)
    fits: dict[str, ThroughputParams] = field(default_factory=dict)


class Saver:
    """Restores on every rank, saves on rank 0; does neither where there is no ``store``.

    ``saved_s`` is when it last tried to save, ``saved_step`` the step of the newest checkpoint as rank 0
    knows it, None without one.
    """

    collective = False
    """Whether all ranks have to call :meth:`save` together."""

    def __init__(
        self, store: CheckpointStore | None, trained: Trained, world: World, *, incarnation: int | None
    ) -> None:
        self._store, self._trained, self._world = store, trained, world
        self._incarnation = incarnation
        self.saved_s = time.monotonic()
        self.saved_step: int | None = None
        self._given = given(trained.optimizers)

    def restore(self) -> bool:
        """Fence off older incarnations and load the newest whole checkpoint; False if there is none.

        Raises FencedError if this incarnation is itself the older one, CheckpointError if the script's
        objects are not those that were saved.
        """
        if self._store is None:
            self._diverge(0)
            return False
        name = ""
        if self._world.rank == 0:
            self._store.claim(self._incarnation)
            name = self._newest(self._store) or ""
        name = self._world.broadcast_text(name)
        if not name:
            self._diverge(0)
            return False
        state = self._store.load(name)
        names = needed(self._trained.optimizers)
        try:
            check_same(state, self._trained.optimizers)
            self._apply_trained(state, self._store)
            check_whole(self._trained.optimizers, names)
            self._apply(state)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{name} in {self._store.place} does not fit the script "
                f"(has the model, optimizer or data changed?): {error}"
            ) from error
        self._compare(state.get("given"))
        self.saved_step = self._trained.history.step
        return True

    def save(self) -> bool:
        """Write a checkpoint if this is rank 0; whether one was written. Raises as CheckpointStore.save."""
        self.saved_s = time.monotonic()
        if self._store is None or self._world.rank != 0:
            return False
        self._store.save(self._gather(), step=self._trained.history.step)
        self.saved_step = self._trained.history.step
        self.saved_s = time.monotonic()
        return True

    def _gather(self) -> dict[str, Any]:
        trained = self._trained
        return {
            "schema": SCHEMA,
            **self._trained_state(),
            "given": self._given,
            "sync": trained.sync.state_dict(),
            "sampler": trained.sampler.state_dict(),
            "history": trained.history.state_dict(),
            "stateful": {name: item.state_dict() for name, item in trained.stateful.items()},
            "profiles": {name: profile.state_dict() for name, profile in trained.profiles.items()},
            "fits": {name: asdict(params) for name, params in trained.fits.items()},
            "rng": rng_state(self._world.device),
        }

    def _apply(self, state: Mapping[str, Any]) -> None:
        trained = self._trained
        if state["schema"] != SCHEMA:
            raise ValueError(f"its schema is {state['schema']}, this agent reads {SCHEMA}")
        trained.sampler.load_state_dict(state["sampler"])
        trained.sync.load_state_dict(state["sync"])
        trained.history.load_state_dict(state["history"])
        for name, item in trained.stateful.items():
            if name not in state["stateful"]:
                raise ValueError(f"it holds nothing of stateful[{name!r}]")
            item.load_state_dict(state["stateful"][name])
        for name, rows in state["profiles"].items():
            trained.profiles.setdefault(name, Profile()).load_state_dict(rows)
        trained.fits.update({name: ThroughputParams(**fit) for name, fit in state["fits"].items()})
        if self._world.rank == 0:
            load_rng_state(state["rng"], self._world.device)
        self._diverge(trained.history.step)

    def _compare(self, saved: list[dict[str, Any]] | None) -> None:
        """Say which options of the script's optimizers the checkpoint overrules, as torch's own do.

        Both are compared as a start gave them, so that a scheduler, or a script that lowers its rate in the
        loop, makes no difference. A checkpoint of an older agent does not tell.
        """
        if saved is None:
            return
        differing = overruled(saved, self._given, given(self._trained.optimizers))
        self._given = saved
        if differing and self._world.rank == 0:
            logger.warning(
                "the training goes on with the checkpoint's %s; to change that, set it in "
                "optimizer.param_groups once the job is made",
                "; ".join(differing),
            )

    def _newest(self, store: CheckpointStore) -> str | None:
        """The newest checkpoint that is whole."""
        return store.newest()

    def _trained_state(self) -> dict[str, Any]:
        """Model and optimizers, in keys of a checkpoint."""
        return {
            "model": self._trained.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._trained.optimizers],
        }

    def _apply_trained(self, state: Mapping[str, Any], store: CheckpointStore) -> None:
        """Give model and optimizers what :meth:`_trained_state` took."""
        self._trained.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._trained.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _diverge(self, step: int) -> None:
        """Give the ranks above 0 random numbers of their own, so that their dropout differs."""
        if self._world.rank > 0:
            torch.manual_seed(hash((self._trained.sampler.seed, self._world.rank, step)) & (2**63 - 1))
