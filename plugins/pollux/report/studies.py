"""Sections that are no simulation of whole workloads: each computes a document of its own, which is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as document

from pollux.bench.scale import Measured, measure
from pollux.policy.autoscale import AUTOSCALERS
from pollux.report.cases import ReportCase, command
from pollux.report.catalog import QUICK_JOBS
from pollux.report.counterexample import BATCHES, EXAMPLE_S, SIGMAS, UPDATE_S, fastest, table, train
from pollux.report.documents import Documents
from pollux.report.parts import COLOURS, Part, colour, hours
from pollux.simulate.autoscale import CloudSettings, Rental, rent
from pollux.simulate.follow import Course, follow
from pollux.traces import read_application
from pollux_agent.protocol import DOCUMENT_CONFIG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLOUD_APPS = ("imagenet", "resnet18")
_CLOUD_NODES = 10
"""About what the paper's training by throughput came to."""

_FOLLOWED_SETS = ("philly-1.0", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """``part`` makes the part of the page, from what is kept where there is such a document."""

    key: str
    part: Callable[[Documents], Part]


@document(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Rentals:
    """One training under each autoscaler: by goodput first, then by throughput."""

    rentals: Annotated[tuple[Rental, ...], Field(min_length=2, max_length=2)]


@document(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Scaled:
    """One decision of each policy on each size of cluster."""

    rows: Annotated[tuple[Measured, ...], Field(min_length=1)]


def studies(traces: Path, names: Sequence[str], *, quick: bool) -> list[Study]:
    """The studies for which the folder has what they need."""
    found = [Study(key="counterexample", part=lambda _: _counterexample())]
    app = next((name for name in _CLOUD_APPS if (traces / "apps" / name).is_dir()), None)
    if app is not None:
        found.append(Study(key="autoscaling", part=lambda kept: _autoscaling(kept, traces, app)))
    folders = [(folder, name) for folder in _FOLLOWED_SETS for name in names]
    there = [pair for pair in folders if (traces / "workloads" / pair[0] / f"{pair[1]}.csv").is_file()]
    if there:
        case = _followed_case("/".join(there[0]), quick=quick)
        found.append(Study(key="co-adaptation", part=lambda kept: _co_adaptation(kept, traces, case)))
    sizes = (64, 512) if quick else (64, 512, 2048, 10240)
    found.append(Study(key="scale", part=lambda kept: _scale(kept, sizes)))
    return found


def _counterexample() -> Part:
    outcomes = table()

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 3.8)
        time, updates = figure.subplots(1, 2)
        for line, sigma in zip(COLOURS, SIGMAS, strict=False):
            reached = [one for one in outcomes if one.sigma == sigma and one.seconds]
            never = [one.batch_size for one in outcomes if one.sigma == sigma and one.seconds is None]
            sizes = [one.batch_size for one in reached]
            seconds, label = [one.seconds for one in reached], f"sigma = {sigma:g}"
            time.plot(sizes, seconds, marker="o", ms=4, color=line, label=label)
            time.plot(never, [5.0] * len(never), marker="x", lw=0, color=line)
            best = fastest(outcomes, sigma)
            time.plot([best.batch_size], [best.seconds], marker="o", ms=11, mfc="none", color=line)
            updates.plot(sizes, [one.updates for one in reached], marker="o", ms=4, color=line)
        time.set(xscale="log", yscale="log", ylabel="seconds to the target", xlabel="batch size")
        updates.set(xscale="log", ylabel="updates to the target", xlabel="batch size")
        updates.locator_params(axis="y", integer=True)
        time.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
        time.set_title("o: fastest, x: never reached", fontsize=9, loc="left")
        for axes in (time, updates):
            axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES], fontsize=8)
            axes.minorticks_off()
        time.legend(fontsize=8, frameon=False)

    rows = [
        (
            f"{one.sigma:g}",
            f"{one.batch_size:,}" + (" (fastest)" if one == fastest(outcomes, one.sigma) else ""),
            "never" if one.updates is None else str(one.updates),
            "-" if one.examples is None else f"{one.examples:,}",
            f"{one.examples_per_s:,.0f}",
            "unreachable" if one.seconds is None else f"{one.seconds:.4f}",
        )
        for one in outcomes
    ]
    return Part(
        key="counterexample",
        title="Throughput alone misleads",
        text=_moral(),
        workloads="no workload: worked out from the recurrence of the expected loss",
        commands=("pollux report --only counterexample --out OUT",),
        draw=draw,
        head=("sigma", "batch size", "updates", "examples", "examples/s", "seconds to the target"),
        rows=rows,
    )


def _moral() -> str:
    small, large = train(64, 0.0), train(1024, 0.0)
    return (
        f"A loss of w^2 / 2 with modelled times of {1000 * UPDATE_S:g} ms an update and "
        f"{1000 * EXAMPLE_S:g} ms an example. A larger batch always processes more examples a second. "
        f"Without noise (sigma = 0) it needs as many updates, {large.updates}, and so takes longer: "
        f"{small.seconds:.3f} s with {small.batch_size} examples each, {large.seconds:.3f} s with "
        f"{large.batch_size:,}. The more noise, the larger the best batch, and small ones then never get to "
        "the target. This is why the scheduler looks at goodput."
    )


def _rentals(traces: Path, app: str) -> Rentals:
    recorded = read_application(traces, app, frozenset({"gpu"}))
    settings = CloudSettings(most_nodes=_CLOUD_NODES)
    return Rentals(rentals=tuple(rent(recorded, policy, settings) for policy in AUTOSCALERS))


def _autoscaling(kept: Documents, traces: Path, app: str) -> Part:
    name = f"autoscaling--{app}--{_CLOUD_NODES}-nodes"
    rentals = kept.get(name, Rentals, lambda: _rentals(traces, app)).rentals

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 4.6)
        nodes, efficiency = figure.subplots(2, sharex=True)
        for line, rental in zip((COLOURS[2], COLOURS[5]), rentals, strict=True):
            time_h = [moment.time_s / 3600 for moment in rental.course]
            rented = [moment.nodes for moment in rental.course]
            nodes.step(time_h, rented, where="pre", color=line, lw=1.8, label=f"by {rental.policy}")
            useful = [moment.efficiency for moment in rental.course]
            efficiency.plot(time_h, useful, color=line, lw=1.2)
        nodes.set(ylabel="nodes rented", ylim=(0, None))
        efficiency.set(ylabel="statistical efficiency", xlabel="hours", ylim=(0, 1.05))
        nodes.legend(fontsize=8, frameon=False, loc="lower right")

    cheap, fast = rentals
    rows = [
        (
            f"by {rental.policy}",
            hours(rental.seconds),
            hours(rental.node_s),
            str(rental.restarts),
            str(max(moment.nodes for moment in rental.course)),
            f"{rental.efficiency:.0%}",
        )
        for rental in rentals
    ]
    return Part(
        key="autoscaling",
        title="Autoscaling in a cloud",
        text=f"One training that rents up to {_CLOUD_NODES} nodes. By throughput (Or et al.) it takes nodes "
        "as long as they process more examples, and they do from the first minute; by goodput as long as "
        "that brings progress, so that its nodes grow with the noise of its gradients. Going by goodput "
        f"costs {cheap.node_s / fast.node_s:.2f} times as much here and takes "
        f"{cheap.seconds / fast.seconds:.2f} times as long. Pollux, section 5.4.1 and Fig. 9, saw 0.75 "
        "and 1.06 for ImageNet.",
        workloads=f"application {app}",
        commands=(f"pollux autoscale --traces TRACES --application {app} --nodes {_CLOUD_NODES}",),
        draw=draw,
        head=("autoscaler", "time", "node hours", "restarts", "most nodes", "mean efficiency"),
        rows=rows,
    )


def _followed_case(workload: str, *, quick: bool) -> ReportCase:
    synthetic = workload.startswith("synthetic/")
    return ReportCase(
        group="follow",
        workload=workload,
        policy="pollux",
        options={},
        cluster="small" if synthetic else "",
        first=QUICK_JOBS if quick and not synthetic else None,
    )


def _co_adaptation(kept: Documents, traces: Path, case: ReportCase) -> Part:
    first = f"--first{case.first}" if case.first else ""
    name = f"co-adaptation--{case.workload.replace('/', '-')}{first}"
    course = kept.get(name, Course, lambda: follow(case.run(traces))[1])
    time_h = [seconds / 3600 for seconds in course.time_s]
    panels = (
        ("active jobs", course.active, COLOURS[6]),
        ("GPUs", course.gpus, COLOURS[0]),
        ("batch size", course.batch_size, COLOURS[1]),
        ("efficiency", course.efficiency, COLOURS[2]),
    )

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 6)
        for axes, (label, values, line) in zip(figure.subplots(4, sharex=True), panels, strict=True):
            axes.fill_between(time_h, values, step="post", color=line, alpha=0.25, lw=0)
            axes.step(time_h, values, where="post", color=line, lw=1.2)
            axes.set(ylabel=label, ylim=(0, None))
        axes.set_xlabel("hours")

    return Part(
        key="co-adaptation",
        title="One job co-adapts",
        text=f"The job that used most GPU time ({course.name}, {course.application}) under pollux. With "
        "few others it gets many GPUs and a large batch; when others come it gives GPUs back and its batch "
        "shrinks, which makes each example count for more. Late in training noise allows larger batches "
        "at the same efficiency. Pollux, Fig. 6.",
        workloads=case.data,
        commands=(command(case),),
        draw=draw,
        head=("quarter of its life", "active jobs", "GPUs", "batch size", "efficiency"),
        rows=[_quarter(course, number) for number in range(4)],
    )


def _quarter(course: Course, number: int) -> tuple[str, ...]:
    """Means over the rounds of a quarter in which the job held GPUs."""
    count = len(course.time_s)
    first, last = number * count // 4, (number + 1) * count // 4
    rounds = range(first, max(last, first + 1))
    held = [index for index in rounds if course.gpus[index]] or [first]
    columns = (course.active, course.gpus, course.batch_size, course.efficiency)
    active, gpus, batch, useful = (fmean(column[index] for index in held) for column in columns)
    return f"{number + 1}", f"{active:.1f}", f"{gpus:.1f}", f"{batch:,.0f}", f"{useful:.0%}"


def _scale(kept: Documents, sizes: tuple[int, ...]) -> Part:
    name = "scale--" + "-".join(map(str, sizes))
    rows = kept.get(
        name, Scaled, lambda: Scaled(rows=tuple(measure(sizes, policies=("sia", "ours"), seed=0)))
    ).rows

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for number, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
            of = [row for row in rows if row.policy == policy]
            gpus, line = [row.gpus for row in of], colour(policy, number)
            decided, relaxed = [row.decide_s for row in of], [row.lp_s for row in of]
            axes.plot(gpus, decided, marker="o", color=line, label=f"{policy}: decision")
            axes.plot(gpus, relaxed, marker=".", ls=":", color=line, label=f"{policy}: relaxation")
        axes.set(xscale="log", yscale="log", xlabel="GPUs (0.6 jobs each)", ylabel="seconds")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.legend(fontsize=8, frameon=False)

    return Part(
        key="scale",
        title="Scale",
        text="Seconds from a snapshot to a plan, beside HiGHS solving the linear relaxation of the same "
        "program; and what the decision gains against the bound that the relaxation gives. Times are those "
        "of the machine that made this page. Sia, Fig. 9.",
        workloads="seeded snapshots of three GPU types",
        commands=("pollux bench scale --gpus " + ",".join(map(str, sizes)),),
        draw=draw,
        head=("GPUs", "jobs", "policy", "decision", "relaxation", "gain / bound"),
        rows=[
            (
                f"{row.gpus:,}",
                f"{row.jobs:,}",
                row.policy,
                f"{row.decide_s:.3f} s",
                f"{row.lp_s:.3f} s",
                "-" if row.objective_ratio is None else f"{row.objective_ratio:.5f}",
            )
            for row in rows
        ],
    )
