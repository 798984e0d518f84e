"""Workers as processes of this machine: one launcher a node, its slots, its CPU quota and its log."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from pollux.local.logs import LogPipe
from pollux.local.nodes import LocalNode, LocalNodes
from pollux.local.ports import LOOPBACK, free_port
from pollux.local.slots import Slots
from pollux_agent.driver import Start
from pollux_agent.driver.quota import Cgroups, Group
from pollux_agent.protocol import JobFolder, Placement
from pollux_agent.settings import WorkerSettings, environment

logger = logging.getLogger(__name__)

_LAUNCHER = (sys.executable, "-m", "pollux_agent.cli", "launch")
_PASSED_ON = (
    "PATH",
    "POLLUX_STACK_MARK",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
)
_MARKS = ("POLLUX_JOB_DIR", "POLLUX_INCARNATION", "POLLUX_NODE")
_TRACKING_PREFIX = "MLFLOW_TRACKING_"
"""Credentials and TLS settings of the tracking server; for those jobs alone that have a run there."""
_PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "TORCH_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What all jobs' workers of this cluster share."""

    slot_share: float
    grace_s: float = 30.0
    report_interval_s: float = 30.0
    checkpoint_interval_s: float = 30.0
    mlflow_tracking_uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The machine that the workers of all jobs share."""

    nodes: LocalNodes
    slots: Slots
    cgroups: Cgroups | None
    options: WorkerOptions


@dataclass(slots=True)
class _NodeGang:
    """One node's part of a gang; ``marks`` are variables that none but its processes have."""

    log: LogPipe
    marks: Mapping[str, str]
    group: Group | None = None
    launcher: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Whether anything is left; what outlives the launcher is killed."""
        if self.launcher is None:
            return False
        return self.launcher.poll() is None or self._kill_members()

    def kill(self) -> None:
        if self.launcher is not None:
            self._kill_members()
            self.launcher.kill()

    def _kill_members(self) -> bool:
        """Kill what is in the group, or carries the marks where there is none; whether there was any."""
        if self.group is not None:
            found = bool(self.group.pids())
            self.group.kill()
            return found
        found = False
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self.marks.items() <= process.environ().items():
                    process.kill()
                    found = True
        return found


@dataclass(slots=True, kw_only=True)
class LocalWorkers:
    """The workers of one job. Starts must come from a thread that lives as long as the service: the kernel
    ends a launcher when the thread that started it ends.
    """

    job_id: str
    folder: JobFolder
    site: Site
    env: Mapping[str, str]
    mlflow_run_id: str = ""
    _gang: dict[str, _NodeGang] | None = field(default=None, init=False)

    def blocked(self, placement: Placement) -> str:
        return self.site.slots.blocked(placement)

    def start(self, start: Start) -> None:
        held = self.site.slots.take(self.job_id, start.placement)
        self._gang = {}
        rendezvous = f"{LOOPBACK}:{free_port()}"
        for node_rank, node in enumerate(start.placement):
            settings = WorkerSettings(
                job_id=self.job_id,
                job_dir=self.folder.root,
                incarnation=start.incarnation,
                node=node,
                slots=held[node],
                placement=start.placement,
                node_rank=node_rank,
                rendezvous=rendezvous,
                gpu_type=self._local_node(node).gpu_type,
                signal_unix_s=start.signal_unix_s,
                slot_share=self._paced_share(node),
                grace_s=self.site.options.grace_s,
                report_interval_s=self.site.options.report_interval_s,
                checkpoint_interval_s=self.site.options.checkpoint_interval_s,
                mlflow_tracking_uri=self.site.options.mlflow_tracking_uri if self.mlflow_run_id else "",
                mlflow_run_id=self.mlflow_run_id,
                parent_pid=os.getpid(),
            )
            own = environment(settings)
            gang = _NodeGang(
                log=LogPipe(self.folder.log(start.incarnation, node)),
                marks={name: own[name] for name in _MARKS},
            )
            self._gang[node] = gang
            try:
                self._launch(gang, settings)
            except OSError as error:
                logger.error("%s: workers on %s could not be started: %s", self.job_id, node, error)
                gang.log.note(f"the workers could not be started: {error}")
                gang.kill()

    def signal(self) -> None:
        for gang in (self._gang or {}).values():
            if gang.launcher is not None and gang.launcher.poll() is None:
                gang.launcher.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for gang in (self._gang or {}).values():
            gang.kill()

    def alive(self) -> Mapping[str, bool] | None:
        if self._gang is None:
            return None
        for gang in self._gang.values():
            gang.log.drain()
        return {node: gang.alive() for node, gang in self._gang.items()}

    def release(self) -> None:
        for gang in (self._gang or {}).values():
            gang.log.close()
            if gang.group is not None and not gang.group.remove():
                logger.warning("control group %s is still in use", gang.group.path)
        self._gang = None
        self.site.slots.release(self.job_id)

    def _launch(self, gang: _NodeGang, settings: WorkerSettings) -> None:
        gang.group = self._group(settings.node, len(settings.slots))
        if gang.group is not None:
            settings = replace(settings, cpu_group=gang.group.members)
        gang.launcher = subprocess.Popen(
            _LAUNCHER,
            env=self._environment(settings),
            cwd=self.folder.root,
            stdin=subprocess.DEVNULL,
            stdout=gang.log.write_end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        gang.log.opened_by_child()

    def _environment(self, settings: WorkerSettings) -> dict[str, str]:
        """Some of this service's variables, the job's, and the agent's; nothing else reaches a job."""
        tracked = (_TRACKING_PREFIX,) if settings.mlflow_run_id else ()
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or name.startswith((*_PASSED_ON_PREFIXES, *tracked))
        }
        devices = self._local_node(settings.node).devices
        visible = ",".join(str(devices[slot]) for slot in settings.slots) if devices else ""
        return {
            **passed_on,
            "PYTHONUNBUFFERED": "1",
            **self.env,
            "CUDA_VISIBLE_DEVICES": visible,
            **environment(settings),
        }

    def _local_node(self, name: str) -> LocalNode:
        node = self.site.nodes.node(name)
        if node is None:
            raise ValueError(f"{self.job_id}: there is no node {name}")
        return node

    def _group(self, node: str, num_slots: int) -> Group | None:
        if self.site.cgroups is None or self._local_node(node).devices:
            return None
        return self.site.cgroups.create(f"{self.job_id}.{node}", num_slots * self.site.options.slot_share)

    def _paced_share(self, node: str) -> float | None:
        """The share that the agent itself must keep to, where no quota does."""
        if self.site.cgroups is not None or self._local_node(node).devices:
            return None
        return self.site.options.slot_share
