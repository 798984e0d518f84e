"""The report's simulations: whole workloads, or for a quick look their first jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pollux.simulate.reproduce import Case
from pollux.simulate.runner import Run

_OPTIONS = {
    "interval_s": "--interval",
    "interference": "--interference",
    "fairness_p": "--p",
    "restart_s": "--restart-s",
}


@dataclass(frozen=True, kw_only=True)
class ReportCase(Case):
    """A case of which only the ``first`` jobs are simulated; None is all of them."""

    first: int | None = None

    @property
    def name(self) -> str:
        """A file name of its own."""
        return super().name + (f"--first{self.first}" if self.first else "")

    def run(self, traces: Path) -> Run:
        """What to simulate; raises TraceError."""
        run = super().run(traces)
        return run if self.first is None else replace(run, workload=run.workload.first(self.first))

    @property
    def data(self) -> str:
        """Which data its result is from, in words."""
        return self.workload + (f" (first {self.first} jobs)" if self.first else "")


def command(case: ReportCase) -> str:
    """The ``pollux simulate`` that repeats a case."""
    words = ["pollux simulate --traces TRACES", f"--workload {case.workload}", f"--policy {case.policy}"]
    options: Mapping[str, object] = case.options
    words += [f"{flag} {options[key]:g}" for key, flag in _OPTIONS.items() if options.get(key) is not None]
    if options.get("avoid_interference") is not None:
        words.append("--avoid-interference" if options["avoid_interference"] else "--no-avoid-interference")
    if options.get("earlier_fits"):
        words.append("--earlier-fits")
    if case.cluster:
        words.append(f"--cluster {case.cluster}")
    if case.first:
        words.append(f"--first {case.first}")
    return " ".join(words)
