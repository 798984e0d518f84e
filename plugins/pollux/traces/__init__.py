"""Recorded training jobs: measured step times, gradient statistics and workloads, read from a folder."""

from pollux.traces.application import Application, gpu_types, read_application
from pollux.traces.steptimes import StepTimes
from pollux.traces.workload import Request, Workload, read_workload

__all__ = [
    "Application",
    "Request",
    "StepTimes",
    "Workload",
    "gpu_types",
    "read_application",
    "read_workload",
]
