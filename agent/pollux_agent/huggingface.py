"""Hugging Face's Trainer, made elastic: ``from pollux_agent.huggingface import ElasticTrainer``.

Needs the extra ``pollux-agent[huggingface]``. A callback could change neither sampler nor accumulation in
mid-run, so this is a subclass with a training loop of its own; model, data, collator, arguments, callbacks,
metrics and evaluation are the Trainer's.
"""

import json
import math
import time
from collections.abc import Mapping, Sized
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, TrainOutput

from pollux_agent.errors import DocumentError
from pollux_agent.model.fit import ThroughputModel
from pollux_agent.model.throughput import StepTimes
from pollux_agent.protocol import ScalingRule
from pollux_agent.settings import worker_settings
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.config import job_spec
from pollux_agent.torch.precondition import Preconditioner


class ElasticTrainer(Trainer):
    """A Trainer whose batch size, accumulation and replicas change in mid-run.

    ``batch_size`` is M0, the total batch size that ``learning_rate`` is right for (default
    ``per_device_train_batch_size`` x ``gradient_accumulation_steps``); one GPU holds at most
    ``per_device_train_batch_size`` samples at a time. The other arguments are those of ElasticJob and of
    Trainer.

    Steps are counted at M0: ``max_steps``, ``warmup_steps``, ``logging_steps``, ``eval_steps``,
    ``save_steps`` and the scheduler mean the same at any batch size, and ``state.global_step`` is the
    progress made. The strategies "epoch" act after each pass over the data. The job's own checkpoints, in
    ``checkpoint_dir`` or in the driver's folder, are what a restart resumes from; those of ``save_strategy``
    are for other uses. ``watch`` names a figure that the Trainer logs, such as "loss".

    Raises DocumentError for what shards or wraps the model in its own way (DeepSpeed, FSDP, DataParallel),
    for what has the data come in another way (``dataloader_drop_last``, ``train_sampling_strategy``, a
    dataloader or sampler of a subclass, a stream), for ``auto_find_batch_size``, for
    ``resume_from_checkpoint``, and for ``gradient_accumulation_steps`` beside another ``batch_size``.
    """

    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(
        self,
        *args: Any,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        scaling_rule: ScalingRule = "sqrt",
        checkpoint_dir: str | Path | None = None,
        preconditioners: Mapping[type[torch.optim.Optimizer], Preconditioner] | None = None,
        throughput: ThroughputModel[StepTimes] | None = None,
        watch: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check(batch_size)
        given: TrainingArguments = self.args
        self._initial = batch_size or given.per_device_train_batch_size * given.gradient_accumulation_steps
        self._options: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "scaling_rule": scaling_rule,
            "checkpoint_dir": checkpoint_dir,
            "preconditioners": preconditioners,
            "throughput": throughput,
            "watch": watch,
        }
        self.job: ElasticJob | None = None
        self._ignored: list[str] | None = None
        self._grad_norm: torch.Tensor | float | None = None
        self._rate = 0.0
        self._steps_since_log = 0

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """As the Trainer's; the job's own checkpoint is gone on from where there is one."""
        if resume_from_checkpoint:
            raise DocumentError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}; leave it out: the job goes on from "
                "its own checkpoints, in checkpoint_dir or the driver's folder; to start from the weights "
                "of another training, make the model with from_pretrained"
            )
        return super().train(None, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; the job hears of the figure that it watches."""
        super().log(logs, *args, **kwargs)
        name = self._options["watch"]
        if name in logs and self.job is not None and not self.job.complete:
            self.job.log(**{name: logs[name]})

    def compute_loss_context_manager(self) -> ExitStack:
        """Mixed precision, which Accelerate brings in only with a model that it has wrapped."""
        stack: ExitStack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self._ignored = ignore_keys_for_eval
        spec = job_spec(worker_settings())
        initial = spec.initial_batch_size if spec is not None else self._initial
        num_samples = len(self.train_dataset)
        epochs = float(self.args.num_train_epochs)
        if self.args.max_steps > 0:
            epochs = self.args.max_steps * initial / num_samples
        if spec is not None and spec.epochs is not None:
            epochs = spec.epochs
        max_steps = math.ceil(epochs * num_samples / initial)
        self._new_state(max_steps, math.ceil(epochs))
        job = self._new_job(max_steps)
        started_s = time.time()
        self._begin(job, started_s)
        for _ in job.epochs(epochs):
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            for inputs in job.loader:
                if self.control.should_training_stop or self.control.should_epoch_stop:
                    break
                self._one_batch(job, inputs)
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_save_evaluate(started_s)
            if self.control.should_training_stop:
                break
        job.finish()
        self._weigh_loss()
        output: TrainOutput = self._finalize_training(trial, num_samples * math.ceil(epochs), started_s)
        return output

    def _new_state(self, max_steps: int, num_epochs: int) -> None:
        self.state = TrainerState(stateful_callbacks=[*self._exportable(), self.control])
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, num_epochs, None)
        self.current_gradient_accumulation_steps = 1

    def _new_job(self, max_steps: int) -> ElasticJob:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.model_wrapped = self.model
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self.job = ElasticJob(
            self.model,
            self.optimizer,
            self.train_dataset,
            batch_size=self._initial,
            max_local_batch_size=self.args.per_device_train_batch_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            lr_scheduler=self.lr_scheduler,
            grad_scaler=self.accelerator.scaler,
            stateful={"trainer": _State(self)},
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            **self._options,
        )
        return self.job

    def _begin(self, job: ElasticJob, started_s: float) -> None:
        self._count(job)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.zeros((), device=self.args.device)
        self._total_loss_scalar = 0.0
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = job.loader
        job.on_step(lambda: self._after_step(job, started_s))
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(None, self._ignored, skip_scheduler=True)

    def _one_batch(self, job: ElasticJob, inputs: Mapping[str, Any]) -> None:
        """Forward, backward and what the loop calls an optimizer step: it counts only with the last batch."""
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        self.optimizer.zero_grad()
        share = job.batch_share * job.num_replicas  # of what is averaged over replicas when it is logged
        loss = self.training_step(job.model, inputs).to(self._tr_loss)
        if self.args.logging_nan_inf_filter and not loss.isfinite():
            loss = self._tr_loss / max(1, self._steps_since_log)
        self._tr_loss += share * loss
        scaler = self.accelerator.scaler
        if self.args.max_grad_norm > 0:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self._grad_norm = nn.utils.clip_grad_norm_(job.model.parameters(), self.args.max_grad_norm)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self._rate = self._get_learning_rate()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    def _after_step(self, job: ElasticJob, started_s: float) -> None:
        before = self.state.global_step
        self._steps_since_log += 1
        self._count(job)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._choose_actions(before)
        self._log_save_evaluate(started_s)

    def _count(self, job: ElasticJob) -> None:
        self.state.global_step = int(job.progress + 1e-6)
        self.state.epoch = job.statistical_epoch

    def _choose_actions(self, before: int) -> None:
        """A step may be worth several of M0's size, or less than one: act once on each multiple passed."""
        now, state, control = self.state.global_step, self.state, self.control
        if now == before:
            control.should_log = control.should_evaluate = control.should_save = False
        if _passed(before, now, self.args.logging_strategy, state.logging_steps):
            control.should_log = True
        if now >= self.args.eval_delay and _passed(before, now, self.args.eval_strategy, state.eval_steps):
            control.should_evaluate = True
        if _passed(before, now, self.args.save_strategy, state.save_steps):
            control.should_save = True

    def _weigh_loss(self) -> None:
        """The Trainer divides the sum of losses by steps of size M0, which are not those that were made."""
        steps, self._steps_since_log = self._steps_since_log, 0
        if steps:
            self._tr_loss *= (self.state.global_step - self._globalstep_last_logged) / steps

    def _log_save_evaluate(self, started_s: float) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._weigh_loss()
        self._maybe_log_save_evaluate(
            self._tr_loss,
            self._grad_norm,
            self.model,
            None,
            self.state.epoch or 0.0,
            self._ignored,
            started_s,
            learning_rate=self._rate,
        )

    def _exportable(self) -> list[Any]:
        """Callbacks with a state of their own."""
        return [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _check(self, batch_size: int | None) -> None:
        wrapped = self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.n_gpu > 1
        if wrapped or self.args.auto_find_batch_size:
            raise DocumentError(
                "args: DeepSpeed, FSDP, several GPUs in one process and auto_find_batch_size do not go with "
                "ElasticTrainer, which spreads and sizes batches itself; turn them off and start one process "
                "a GPU"
            )
        accumulated = self.args.gradient_accumulation_steps
        of_args = self.args.per_device_train_batch_size * accumulated
        if accumulated != 1 and batch_size not in (None, of_args):
            raise DocumentError(
                f"gradient_accumulation_steps is {accumulated}, which makes M0 {of_args}, but batch_size is "
                f"{batch_size}; leave one of them out: the job accumulates as the batch size needs it"
            )
        if self.args.dataloader_drop_last:
            raise DocumentError(
                "dataloader_drop_last is True; leave it False: a pass has no fixed batches, and its "
                "last step takes what is left"
            )
        unheeded = {
            "torch_compile": (self.args.torch_compile, "give the Trainer torch.compile(model)"),
            "include_num_input_tokens_seen": (
                self.args.include_num_input_tokens_seen not in (False, "no"),
                "count tokens in a callback",
            ),
        }
        for name, (is_set, fix) in unheeded.items():
            if is_set:
                raise DocumentError(
                    f"{name} is {getattr(self.args, name)!r}, which ElasticTrainer does not heed; leave it "
                    f"out, and {fix}"
                )
        self._check_data()

    def _check_data(self) -> None:
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy != "random":
            raise DocumentError(
                f"train_sampling_strategy is {strategy!r}; leave it 'random': the job shuffles each pass, so "
                "that a restart at another size goes on at the exact sample"
            )
        for name in ("get_train_dataloader", "_get_train_sampler"):
            if getattr(type(self), name) is not getattr(Trainer, name):
                raise DocumentError(
                    f"{name} is {type(self).__name__}'s own, but the job makes the loader; leave it out, and "
                    "give train_dataset and data_collator what it does"
                )
        data = self.train_dataset
        if data is not None and not isinstance(data, Sized):
            raise DocumentError(
                f"train_dataset is a {type(data).__name__} without a length; give a map-style data set, or "
                "train a stream with ElasticJob in a loop of your own"
            )


def _passed(before: int, now: int, strategy: str, every: float) -> bool:
    """Whether a multiple of ``every`` steps lies in (before, now]."""
    return strategy == IntervalStrategy.STEPS and every > 0 and now // every > before // every


class _State:
    """The Trainer's own state, as a checkpoint holds it: history, best metric, callbacks."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self._trainer.state)
        state["stateful_callbacks"] = {}
        callbacks = [(type(each).__name__, each.state()) for each in self._trainer._exportable()]
        return {"state": json.dumps(state, default=float), "callbacks": json.dumps(callbacks, default=float)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """History and callbacks as they were; how long to train is what the arguments say now."""
        trainer, now = self._trainer, self._trainer.state
        trainer.state = TrainerState(**json.loads(state["state"]))
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"):
            setattr(trainer.state, name, getattr(now, name))
        trainer.state.is_world_process_zero = now.is_world_process_zero
        trainer.state.is_local_process_zero = now.is_local_process_zero
        trainer.state.stateful_callbacks = now.stateful_callbacks
        saved = json.loads(state["callbacks"])
        for each in trainer._exportable():
            place = next((at for at, (name, _) in enumerate(saved) if name == type(each).__name__), None)
            if place is not None:
                for name, value in saved.pop(place)[1]["attributes"].items():
                    setattr(each, name, value)
