"""``pollux verify``: recompute from the files of a stopped stack what a run claims about itself."""

from pollux.verify.checks import Check, run_checks
from pollux.verify.export import AirflowExport, DagRun, TaskInstance
from pollux.verify.figures import JobFigures, figures_of
from pollux.verify.record import (
    EXPECTATIONS_FILE,
    EXPORT_FILE,
    Expectation,
    Expectations,
    JobRecord,
    RunRecord,
    read_record,
)

__all__ = [
    "EXPECTATIONS_FILE",
    "EXPORT_FILE",
    "AirflowExport",
    "Check",
    "DagRun",
    "Expectation",
    "Expectations",
    "JobFigures",
    "JobRecord",
    "RunRecord",
    "TaskInstance",
    "figures_of",
    "read_record",
    "run_checks",
]
