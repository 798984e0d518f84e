"""The trigger that watches one training job while its Airflow task is deferred."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TriggerEvent

from pollux.airflow_api import AirflowApi
from pollux.cluster.base import FINAL_PHASES, JobControl, StopReason
from pollux.errors import ClusterError, ClusterUnavailable, Conflict, DriverLost, UnknownJob
from pollux.settings import Settings, settings
from pollux.triggers.connect import KubeReach, connect, connect_kubernetes, cursor_file
from pollux.triggers.relay import Relay
from pollux_agent.protocol import to_plain

_ON_KILL_RETRY_S = 1.0
_ON_KILL_ASK_S = 12.0
_ON_KILL_LIMIT_S = 25.0
"""Airflow gives ``on_kill`` 30 s; the first of them go on asking what happened."""

_AT_WORK: set["asyncio.Task[None]"] = set()
"""Keeps the stops that are being asked for alive when Airflow waits for them no longer."""

_STOP_BY_STATE: dict[str | None, StopReason] = {
    "success": "success",
    "failed": "failed",
    "upstream_failed": "failed",
    "skipped": "failed",
    "removed": "failed",
}


class PolluxTrainingTrigger(BaseTrigger):
    """Follows a job to its end: its output and its changes go to the task's log, its end is the event.

    The event is ``{"job": <the final ClusterJob as plain values>}``, without the job's environment variables,
    which may hold secrets and would be kept in Airflow's database; or ``{"error": "..."}`` when the
    cluster does not know the job, or refuses to tell of it. A cluster that is away is waited for, without
    limit. The end of the trigger, such as the triggerer's restart, leaves the job alone; only a person's act
    on the task ends it.
    On Kubernetes a job whose driver is gone is ``{"lost": "...", "lived_s": ...}``; the task submits it anew.
    """

    def __init__(
        self,
        job_id: str,
        cluster: str = "local",
        poll_interval_s: float = 2.0,
        kube: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.kube = kube
        self.job_id = job_id
        self.cluster = cluster
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {
            "job_id": self.job_id,
            "cluster": self.cluster,
            "poll_interval_s": self.poll_interval_s,
        }
        if self.kube is not None:
            arguments["kube"] = self.kube
        return "pollux.triggers.training.PolluxTrainingTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        config = settings()
        relay = Relay(
            await self._control(config),
            self.job_id,
            self.log,
            cursor_file=cursor_file(config, self.job_id, self.cluster),
        )
        began_s = time.monotonic()
        try:
            while (job := await asyncio.to_thread(relay.poll)) is None:
                await asyncio.sleep(self.poll_interval_s)
        except UnknownJob as error:
            if self.kube is None:
                yield TriggerEvent({"error": str(error)})
            else:
                yield TriggerEvent({"lost": str(error), "lived_s": time.monotonic() - began_s})
            return
        except ClusterError as error:
            yield TriggerEvent({"error": str(error)})
            return
        told = replace(job, spec=replace(job.spec, env={}))
        yield TriggerEvent({"job": to_plain(told)})

    async def on_kill(self) -> None:
        """Ask for the job's end: Airflow calls this alike for mark failed, mark success and clear.

        Airflow repeats the cancellation that led here each second until this is over, so the work is shielded
        from it.
        """
        work = asyncio.create_task(self._stop_job())
        _AT_WORK.add(work)
        work.add_done_callback(_AT_WORK.discard)
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                continue

    async def _stop_job(self) -> None:
        """failed ends the job at once; success and clear let it write a checkpoint.

        The request is kept with the job, so it needs to get through only once.
        """
        deadline_s = asyncio.get_running_loop().time() + _ON_KILL_LIMIT_S
        config = settings()
        reason = await self._stop_reason(config)
        while True:
            try:
                control = await self._control(config)
                if not await asyncio.to_thread(_is_over, control, self.job_id):
                    await asyncio.to_thread(control.stop, self.job_id, reason)
                self.log.info("Asked the cluster to stop %s (%s)", self.job_id, reason)
                return
            except UnknownJob:
                return
            except (ClusterUnavailable, Conflict) as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    self.log.warning("Could not stop %s; the next cycle ends it: %s", self.job_id, error)
                    return
                await asyncio.sleep(_ON_KILL_RETRY_S)

    async def _control(self, config: Settings) -> JobControl:
        if self.kube is None:
            return connect(config, self.cluster)
        return await asyncio.to_thread(connect_kubernetes, config, KubeReach(**self.kube))

    async def _stop_reason(self, config: Settings) -> StopReason:
        """What the person did, from the task's state now: a cleared task has none, or is queued again."""
        try:
            async with asyncio.timeout(_ON_KILL_ASK_S):
                state = await self._task_state(config)
        except Exception as error:  # noqa: BLE001 - whatever Airflow raises, the job must still be stopped
            self.log.warning("Airflow does not tell the task's state; stopping with a checkpoint: %r", error)
            return "clear"
        return _STOP_BY_STATE.get(state, "clear")

    async def _task_state(self, config: Settings) -> str | None:
        """The task's state, ``removed`` if it is gone.

        Airflow's REST API is asked where a log-in is set: the triggerer's own way to it builds a whole API
        application at its first use, for which ``on_kill`` has not always the time.
        """
        instance = self.task_instance
        if config.airflow_url and config.airflow_login is not None:
            with AirflowApi.from_login(config.airflow_url, config.airflow_login) as api:
                found = await asyncio.to_thread(
                    api.task_instance, instance.dag_id, instance.run_id, instance.task_id, instance.map_index
                )
            return found.state if found else "removed"
        states = await asyncio.to_thread(
            RuntimeTaskInstance.get_task_states,
            dag_id=instance.dag_id,
            task_ids=[instance.task_id],
            run_ids=[instance.run_id],
            map_index=instance.map_index,
        )
        mapped = f"{instance.task_id}_{instance.map_index}"
        key = mapped if instance.map_index >= 0 else instance.task_id
        state: str | None = states.get(instance.run_id, {}).get(key, "removed")
        return state


def _is_over(control: JobControl, job_id: str) -> bool:
    """Whether the job came to its end; one that has lost its driver may still have workers."""
    try:
        return control.job(job_id).status.phase in FINAL_PHASES
    except DriverLost:
        return False
