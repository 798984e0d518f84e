"""The operator of one training job: submit, wait, and turn the job's end into the task's."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from pollux.cluster.base import FINAL_PHASES, ClusterJob, JobControl, JobIdentity, StopReason
from pollux.cluster.identity import job_id
from pollux.errors import (
    ClusterError,
    ClusterUnavailable,
    ConfigError,
    DriverLost,
    Refused,
    StoreError,
    UnknownJob,
)
from pollux.jobruns import close_run
from pollux.operators import kube
from pollux.operators.links import MLflowRunLink, mlflow_run_url
from pollux.operators.verdict import judge
from pollux.settings import Settings, settings
from pollux.store import ModelStore
from pollux.triggers.connect import connect, connect_kubernetes, cursor_file
from pollux.triggers.relay import Relay
from pollux.triggers.training import PolluxTrainingTrigger
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import JobSpec, from_plain

if TYPE_CHECKING:
    from pollux.cluster.k8s import KubeCluster

_DEFERRAL_FAILED = "__fail__"
"""What Airflow resumes a deferred task with when its trigger failed or its time is over."""


class PolluxTrainingOperator(KubernetesPodOperator):
    """Trains one job on GPUs that the scheduler gives and takes by goodput.

    The fields of a job (see ``pollux_agent.protocol.JobSpec``) are given one by one, as ``spec``, or both;
    a field given by itself wins. The job's name is ``job_name``, by default the task's id. ``spec`` is a
    mapping whose texts are templates, or a callable ``(context, jinja_env) -> mapping``. A field that is None
    counts as not given. A template gives text, so one for a number needs a DAG with
    ``render_template_as_native_obj=True``.

    ``cluster`` is ``local`` or ``kubernetes`` (default: the settings'). On Kubernetes all parameters of the
    base class describe the pods of the workers, but for commands, GPUs and node, which are ours; the
    driver's pod, small and without GPUs, is what its callbacks, deadline and finish action are about.
    With ``fresh`` a new run or a cleared task starts over, without its checkpoints and also if it was done;
    a retry never does. It may come from the run's conf as well. ``deferrable=False`` waits in the task's
    process instead of the triggerer.

    The task succeeds only if the job wrote its completion marker. A wrong spec, a refused job and an error
    that a retry cannot help fail at once; any other failure costs a retry, which goes on from the checkpoint.
    """

    template_fields: Sequence[str] = (*KubernetesPodOperator.template_fields, "spec", "fresh")
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **KubernetesPodOperator.template_fields_renderers,
        "spec": "json",
    }
    operator_extra_links = (MLflowRunLink(),)

    def __init__(
        self,
        *,
        spec: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
        job_name: str | None = None,
        script: str | None = None,
        arguments: Sequence[str] | None = None,
        kind: str | None = None,
        initial_batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        max_local_batch_size: int | str | None = None,
        min_local_batch_size: int | str | None = None,
        min_gpus: int | str | None = None,
        max_gpus: int | str | None = None,
        scaling_rule: str | None = None,
        epochs: int | str | None = None,
        model: str | None = None,
        checkpoint_url: str | None = None,
        preemptible: bool | None = None,
        gpu_types: Sequence[str] | None = None,
        gpus_per_replica: int | None = None,
        priority: float | str | None = None,
        team: str | None = None,
        reserved_from_unix_s: float | None = None,
        reserved_until_unix_s: float | None = None,
        estimator: str | None = None,
        latency_limit_s: float | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool | str = False,
        cluster: str | None = None,
        deferrable: bool = True,
        retries: int = 3,
        retry_delay: timedelta | float = timedelta(seconds=10),
        **kwargs: Any,
    ) -> None:
        super().__init__(deferrable=deferrable, retries=retries, retry_delay=retry_delay, **kwargs)
        given = {
            "name": job_name,
            "script": script,
            "arguments": arguments,
            "kind": kind,
            "initial_batch_size": initial_batch_size,
            "max_batch_size": max_batch_size,
            "max_local_batch_size": max_local_batch_size,
            "min_local_batch_size": min_local_batch_size,
            "min_gpus": min_gpus,
            "max_gpus": max_gpus,
            "scaling_rule": scaling_rule,
            "epochs": epochs,
            "model": model,
            "checkpoint_url": checkpoint_url,
            "preemptible": preemptible,
            "gpu_types": gpu_types,
            "gpus_per_replica": gpus_per_replica,
            "priority": priority,
            "team": team,
            "reserved_from_unix_s": reserved_from_unix_s,
            "reserved_until_unix_s": reserved_until_unix_s,
            "estimator": estimator,
            "latency_limit_s": latency_limit_s,
            "env": env,
        }
        given = {field: value for field, value in given.items() if value is not None}
        if callable(spec) and given:
            raise ValueError(
                f"spec is a callable, but {', '.join(given)} are given besides; let the callable return them"
            )
        self.spec: Any = spec if callable(spec) else {**(spec or {}), **given}
        self.fresh = fresh
        self.cluster = cluster
        self.job_id = ""
        self.mlflow_run_url = ""
        self._busy = False
        self._context: Any = None

    def execute(self, context: Any) -> dict[str, Any] | None:
        return self._run(context, fresh=self._wants_fresh(context))

    def execute_complete(self, context: Any, event: dict[str, Any], **kwargs: Any) -> dict[str, Any] | None:
        """Where Airflow resumes with the trigger's event; ``kwargs`` are the ones that it deferred with."""
        if "error" in event:
            self._give_up(context)
            raise AirflowException(event["error"])
        if "lost" in event:
            lived = float(event.get("lived_s", 0.0)) >= kube.LONG_LIVED_S
            losses = 1 if lived else int(kwargs.get("losses", 0)) + 1
            self._note_loss(context, event["lost"], losses)
            return self._run(context, fresh=False, losses=losses)
        kwargs.pop("losses", None)
        job = from_plain(ClusterJob, event["job"])
        self._note_run(job)
        return self._conclude(context, job, **kwargs)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """As every operator does, but a job whose deferral ran out of time, or that no try comes back for, is
        stopped first.
        """
        if next_method == _DEFERRAL_FAILED:
            over = "timeout" in str((next_kwargs or {}).get("error", "")).lower()
            self._give_up(context, even_with_retries=over)
        return super().resume_execution(next_method, next_kwargs, context)

    def _give_up(self, context: Any, *, even_with_retries: bool = False) -> None:
        """Stop the job, unless there is a try left for it: it would hold its GPUs for nobody."""
        config = self._settings()
        self.job_id = job_id(self._identity(context, config), self._spec(context).name)
        if even_with_retries or context["ti"].try_number > context["ti"].max_tries:
            self._stop(config, "failed")

    def on_kill(self) -> None:
        """SIGTERM, or a timeout of the task's own waiting: the job writes a checkpoint and frees its GPUs.

        Where it comes as a signal handler, ``_wait`` does the asking and then raises: never a success.
        """
        self._killed = True
        if self.job_id and not self._busy:
            self._stop(self._settings(), "clear")

    def _run(self, context: Any, *, fresh: bool, losses: int = 0) -> dict[str, Any] | None:
        """Submit the job and follow it, in the triggerer or here; a job that loses its driver goes on with
        a new one.
        """
        config = self._settings()
        spec = self._spec(context)
        self._context = context
        control = self._control(config)
        self._busy = True
        try:
            while True:
                job = self._submit(context, spec, config, control, fresh=fresh)
                if job.status.phase in FINAL_PHASES:
                    break
                if self.deferrable and not self._killed:
                    self._defer(config, fresh=fresh, losses=losses)
                try:
                    job = self._wait(config, control)
                    break
                except DriverLost as error:
                    losses += 1
                    self._note_loss(context, str(error), losses)
                    fresh = False
        finally:
            self._busy = False
        return self._conclude(context, job, fresh=fresh)

    def _note_loss(self, context: Any, why: str, losses: int) -> None:
        """Raises AirflowException where drivers are lost again and again, AirflowFailException at the task's
        own deadline; what nobody comes back for is stopped first, workers and all.
        """
        if "DeadlineExceeded" in why:
            self._give_up(context, even_with_retries=True)
            raise AirflowFailException(f"active_deadline_seconds is over: {why}")
        if losses > kube.MAX_LOSSES:
            self._give_up(context)
            raise AirflowException(f"{losses} drivers in a row were lost soon after they began: {why}")
        self.log.warning("The job goes on from its checkpoint with a new driver: %s", why)

    def _submit(
        self, context: Any, spec: JobSpec, config: Settings, control: JobControl, *, fresh: bool
    ) -> ClusterJob:
        """The job as the cluster has it now: new, found again, or opened again."""
        identity = self._identity(context, config)
        self.job_id = job_id(identity, spec.name)
        run_id = None
        try:
            if fresh:
                self._stop_for_fresh(control)
            run_id = self._ensure_run(config, identity, spec)
            job = control.submit(self.job_id, identity=identity, spec=spec, run_id=run_id, fresh=fresh)
        except Refused as error:
            self._close_run(config, run_id, str(error))
            raise AirflowFailException(f"The cluster refuses {self.job_id}: {error}") from None
        except ClusterError as error:
            raise AirflowException(f"{self.job_id} could not be submitted: {error}") from error
        self._note_run(job)
        self.log.info(
            "Submitted %s: %s on %s to %s GPUs, M0 %s",
            self.job_id,
            spec.script,
            spec.min_gpus,
            spec.max_gpus,
            spec.initial_batch_size,
        )
        return job

    def _defer(self, config: Settings, *, fresh: bool, losses: int) -> None:
        self.defer(
            trigger=PolluxTrainingTrigger(
                job_id=self.job_id,
                cluster=self.cluster or config.cluster,
                poll_interval_s=self.poll_interval,
                kube=kube.reach_of(self).plain() if self._on_kubernetes(config) else None,
            ),
            method_name="execute_complete",
            kwargs={"fresh": fresh, **({"losses": losses} if losses else {})},
            timeout=self.execution_timeout,
        )

    def _wait(self, config: Settings, control: JobControl) -> ClusterJob:
        """Follow the job in the task's own process."""
        remembered = cursor_file(config, self.job_id, self.cluster or config.cluster)
        relay = Relay(control, self.job_id, self.log, cursor_file=remembered)
        job = None
        try:
            while not self._killed and (job := relay.poll()) is None:
                time.sleep(self.poll_interval)
        except UnknownJob as error:
            if self._on_kubernetes(config) and not self._killed:
                raise DriverLost(str(error)) from error
            raise AirflowException(str(error)) from error
        if job is None or self._killed:
            self._stop(config, "clear")
            raise AirflowException(f"The task was killed; {self.job_id} writes a checkpoint and ends")
        return job

    def _conclude(self, context: Any, job: ClusterJob, *, fresh: bool = False) -> dict[str, Any] | None:
        verdict = judge(job)
        outcome = job.status.outcome
        if verdict.kind == "resubmit":
            self.log.info("%s, so it is submitted again", verdict.message)
            return self._run(context, fresh=fresh)
        self._tidy(job, final=verdict.kind != "retry", succeeded=verdict.kind == "success")
        if verdict.kind == "success" and outcome is not None:
            return {
                "job_id": job.job_id,
                "mlflow_run_id": job.mlflow_run_id,
                "step": outcome.step,
                "progress": outcome.progress,
                "restarts": job.status.restarts,
            }
        if verdict.kind == "skip":
            self.log.warning("Skipped: %s", verdict.message)
            raise AirflowSkipException(verdict.message)
        if outcome is not None and outcome.traceback:
            self.log.error("The training script's traceback:\n%s", outcome.traceback)
        raise (AirflowFailException if verdict.kind == "fail" else AirflowException)(verdict.message)

    def _tidy(self, job: ClusterJob, *, final: bool, succeeded: bool) -> None:
        """On Kubernetes a job with its last verdict is recorded, and then its driver's pod goes as asked.

        What cannot be done yet, since MLflow is away or still gets figures, the scheduling cycle does.
        """
        config = self._settings()
        if not final or not self._on_kubernetes(config) or not kube.deletes_pod(self, succeeded=succeeded):
            return
        try:
            if config.mlflow_tracking_uri:
                close_run(self._store(config), job)
            cluster = self._kubernetes(config)
            if kube.driver_ends(cluster, job.job_id):
                cluster.remove(job.job_id)
            else:
                self.log.warning("The driver of %s goes on until MLflow has its last figures", job.job_id)
        except UnknownJob:
            return
        except (StoreError, ClusterError) as error:
            self.log.warning("The driver's pod of %s stays for now: %s", job.job_id, error)

    def _stop_for_fresh(self, control: JobControl) -> None:
        """A job at work cannot start over: it is stopped, and what is submitted then starts from nothing."""
        try:
            if control.job(self.job_id).status.phase not in FINAL_PHASES:
                control.stop(self.job_id, "failed")
        except UnknownJob:
            return

    def _stop(self, config: Settings, reason: StopReason) -> None:
        """Ask for the job's end; if that cannot be done the scheduling cycle ends it, and the log says so."""
        try:
            job = self._control(config).stop(self.job_id, reason)
            self.log.info("Asked the cluster to stop %s (%s), now %s", self.job_id, reason, job.status.phase)
        except UnknownJob:
            self.log.info("The cluster has no job %s to stop", self.job_id)
        except ClusterError as error:
            self.log.warning("Could not stop %s, the scheduling cycle will: %s", self.job_id, error)

    def _ensure_run(self, config: Settings, identity: JobIdentity, spec: JobSpec) -> str | None:
        """The job's one MLflow run, or None while MLflow is away: then the scheduling cycle makes it."""
        if not config.mlflow_tracking_uri:
            self.log.warning("MLFLOW_TRACKING_URI is not set, so %s is submitted without a run", self.job_id)
            return None
        try:
            return self._store(config).ensure_run(self.job_id, identity, spec, time.time())
        except StoreError as error:
            self.log.warning(
                "No MLflow run could be made, so %s is submitted without and waits until the scheduling "
                "cycle has made one: %s",
                self.job_id,
                error,
            )
            return None

    def _close_run(self, config: Settings, run_id: str | None, why: str) -> None:
        """A refused job never trains, so its run ends here."""
        if run_id is None:
            return
        try:
            self._store(config).close_run(run_id, "FAILED", how="refused", message=why)
        except StoreError as error:
            self.log.warning("The MLflow run %s stays open: %s", run_id, error)

    def _store(self, config: Settings) -> ModelStore:
        return ModelStore(
            config.mlflow_tracking_uri,
            experiment=config.experiment,
            decisions_experiment=config.decisions_experiment,
            deployment=config.deployment,
        )

    def _settings(self) -> Settings:
        try:
            return settings()
        except ConfigError as error:
            raise AirflowFailException(str(error)) from None

    def _on_kubernetes(self, config: Settings) -> bool:
        return (self.cluster or config.cluster) == "kubernetes"

    def _kubernetes(self, config: Settings) -> "KubeCluster":
        return connect_kubernetes(config, kube.reach_of(self), lambda: kube.user_pod(self, self._context))

    def _control(self, config: Settings) -> JobControl:
        try:
            if self._on_kubernetes(config):
                return self._kubernetes(config)
            return connect(config, self.cluster)
        except ClusterUnavailable as error:
            raise AirflowException(str(error)) from None
        except ConfigError as error:
            raise AirflowFailException(str(error)) from None
        except Refused as error:
            raise AirflowFailException(str(error)) from None

    def _spec(self, context: Any) -> JobSpec:
        plain = {field: value for field, value in self.spec.items() if value is not None}
        try:
            return from_plain(JobSpec, {"name": context["ti"].task_id, **plain})
        except DocumentError as error:
            raise AirflowFailException(str(error)) from None

    def _identity(self, context: Any, config: Settings) -> JobIdentity:
        ti = context["ti"]
        return JobIdentity(
            deployment=config.deployment,
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            task_id=ti.task_id,
            map_index=-1 if ti.map_index is None else ti.map_index,
        )

    def _wants_fresh(self, context: Any) -> bool:
        """``fresh`` counts in the first try after the start or a clear; a retry goes on from a checkpoint.

        Clearing raises ``max_tries``, so the first try of a round is known as Airflow itself knows it.
        """
        ti = context["ti"]
        if ti.try_number != ti.max_tries - self.retries + 1:
            return False
        conf = context["dag_run"].conf or {}
        for value in (conf.get("fresh"), self.fresh):
            if str(value).lower() not in ("true", "false", "none", ""):
                raise AirflowFailException(f"fresh is {value!r}; set it to true or false")
        return "true" in (str(conf.get("fresh")).lower(), str(self.fresh).lower())

    def _note_run(self, job: ClusterJob) -> None:
        """Remember what the extra link needs."""
        self.job_id = job.job_id
        config = self._settings()
        url = config.mlflow_url or config.mlflow_tracking_uri
        if job.mlflow_run_id and url.startswith(("http://", "https://")):
            self.mlflow_run_url = mlflow_run_url(url, job.mlflow_run_id)
