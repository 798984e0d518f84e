"""Sections that are no simulation of whole workloads: each computes a document of its own, which is kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pollux.report.cases import ReportCase, command
from pollux.report.catalog import QUICK_JOBS
from pollux.report.counterexample import BATCHES, EXAMPLE_S, SIGMAS, UPDATE_S, fastest, table, train
from pollux.report.parts import COLOURS, Part, colour, hours
from pollux.simulate.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Document = dict[str, Any]

_CLOUD_APPS = ("imagenet", "resnet18")
_CLOUD_NODES = 10
"""About what the paper's training by throughput came to."""

_FOLLOWED_SETS = ("philly-1.0", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """``compute`` makes the document, ``show`` a part of the page from it."""

    key: str
    compute: Callable[[], Document]
    show: Callable[[Document], Part]


def studies(traces: Path, names: Sequence[str], *, quick: bool) -> list[Study]:
    """The studies for which the folder has what they need."""
    found = [Study(key="counterexample", compute=dict, show=lambda _: _counterexample())]
    app = next((name for name in _CLOUD_APPS if (traces / "apps" / name).is_dir()), None)
    if app is not None:
        found.append(
            Study(
                key="autoscaling",
                compute=lambda: _rentals(traces, app),
                show=lambda doc: _autoscaling(doc, app),
            )
        )
    folders = [(folder, name) for folder in _FOLLOWED_SETS for name in names]
    there = [pair for pair in folders if (traces / "workloads" / pair[0] / f"{pair[1]}.csv").is_file()]
    if there:
        workload = "/".join(there[0])
        found.append(
            Study(
                key="co-adaptation",
                compute=lambda: _followed(traces, workload, quick=quick),
                show=lambda doc: _co_adaptation(doc, workload, quick=quick),
            )
        )
    sizes = (64, 512) if quick else (64, 512, 2048, 10240)
    found.append(Study(key="scale", compute=lambda: _measured(sizes), show=lambda doc: _scale(doc, sizes)))
    return found


def computed(study: Study, folder: Path, *, suffix: str) -> Document:
    """The study's document: the one that is kept, else a new one, which is kept.

    Raises TraceError, OSError.
    """
    path = folder / f"study-{study.key}{suffix}.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        document = study.compute()
    write_whole(path, json.dumps(document, indent=1) + "\n")
    return document


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


def _rentals(traces: Path, app: str) -> Document:
    from pollux.policy.autoscale import AUTOSCALERS
    from pollux.simulate.autoscale import CloudSettings, rent
    from pollux.traces import read_application

    recorded = read_application(traces, app, frozenset({"gpu"}))
    settings = CloudSettings(most_nodes=_CLOUD_NODES)
    rentals = [rent(recorded, policy, settings) for policy in AUTOSCALERS]
    return {
        "rentals": [
            asdict(rental)
            | {
                "course": {
                    name: [getattr(moment, name) for moment in rental.course]
                    for name in ("time_s", "nodes", "batch_size", "efficiency")
                }
            }
            for rental in rentals
        ]
    }


def _autoscaling(document: Document, app: str) -> Part:
    rentals = document["rentals"]

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 4.6)
        nodes, efficiency = figure.subplots(2, sharex=True)
        for number, rental in enumerate(rentals):
            course, line = rental["course"], COLOURS[(2, 5)[number % 2]]
            time_h = [seconds / 3600 for seconds in course["time_s"]]
            nodes.step(
                time_h, course["nodes"], where="pre", color=line, lw=1.8, label=f"by {rental['policy']}"
            )
            efficiency.plot(time_h, course["efficiency"], color=line, lw=1.2)
        nodes.set(ylabel="nodes rented", ylim=(0, None))
        efficiency.set(ylabel="statistical efficiency", xlabel="hours", ylim=(0, 1.05))
        nodes.legend(fontsize=8, frameon=False, loc="lower right")

    cheap, fast = rentals[0], rentals[-1]
    rows = [
        (
            f"by {rental['policy']}",
            hours(rental["seconds"]),
            hours(rental["node_s"]),
            str(rental["restarts"]),
            str(max(rental["course"]["nodes"])),
            f"{sum(rental['course']['efficiency']) / len(rental['course']['efficiency']):.0%}",
        )
        for rental in rentals
    ]
    return Part(
        key="autoscaling",
        title="Autoscaling in a cloud",
        text=f"One training that rents up to {_CLOUD_NODES} nodes. By throughput (Or et al.) it takes nodes "
        "as long as they process more examples, and they do from the first minute; by goodput as long as "
        "that brings progress, so that its nodes grow with the noise of its gradients. Going by goodput "
        f"costs {cheap['node_s'] / fast['node_s']:.2f} times as much here and takes "
        f"{cheap['seconds'] / fast['seconds']:.2f} times as long. Pollux, section 5.4.1 and Fig. 9, saw 0.75 "
        "and 1.06 for ImageNet.",
        workloads=f"application {app}",
        commands=(f"pollux autoscale --traces TRACES --application {app} --nodes {_CLOUD_NODES}",),
        draw=draw,
        head=("autoscaler", "time", "node hours", "restarts", "most nodes", "mean efficiency"),
        rows=rows,
    )


def _followed(traces: Path, workload: str, *, quick: bool) -> Document:
    from pollux.simulate.follow import follow

    _, course = follow(_followed_case(workload, quick=quick).run(traces))
    return asdict(course)


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


def _co_adaptation(document: Document, workload: str, *, quick: bool) -> Part:
    time_h = [seconds / 3600 for seconds in document["time_s"]]
    panels = (
        ("active jobs", document["active"], COLOURS[6]),
        ("GPUs", document["gpus"], COLOURS[0]),
        ("batch size", document["batch_size"], COLOURS[1]),
        ("efficiency", document["efficiency"], COLOURS[2]),
    )

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 6)
        for axes, (label, values, line) in zip(figure.subplots(4, sharex=True), panels, strict=True):
            axes.fill_between(time_h, values, step="post", color=line, alpha=0.25, lw=0)
            axes.step(time_h, values, where="post", color=line, lw=1.2)
            axes.set(ylabel=label, ylim=(0, None))
        axes.set_xlabel("hours")

    rows = [_quarter(document, number) for number in range(4)]
    case = _followed_case(workload, quick=quick)
    return Part(
        key="co-adaptation",
        title="One job co-adapts",
        text=f"The job that used most GPU time ({document['name']}, {document['application']}) under "
        "pollux. With "
        "few others it gets many GPUs and a large batch; when others come it gives GPUs back and its batch "
        "shrinks, which makes each example count for more. Late in training noise allows larger batches "
        "at the "
        "same efficiency. Pollux, Fig. 6.",
        workloads=case.data,
        commands=(command(case),),
        draw=draw,
        head=("quarter of its life", "active jobs", "GPUs", "batch size", "efficiency"),
        rows=rows,
    )


def _quarter(document: Mapping[str, Any], number: int) -> tuple[str, ...]:
    count = len(document["time_s"])
    span = slice(number * count // 4, max((number + 1) * count // 4, number * count // 4 + 1))
    held = [index for index in range(count)[span] if document["gpus"][index]] or [span.start]
    means = {
        name: sum(document[name][index] for index in held) / len(held)
        for name in ("active", "gpus", "batch_size", "efficiency")
    }
    return (
        f"{number + 1}",
        f"{means['active']:.1f}",
        f"{means['gpus']:.1f}",
        f"{means['batch_size']:,.0f}",
        f"{means['efficiency']:.0%}",
    )


def _measured(sizes: tuple[int, ...]) -> Document:
    from pollux.bench.scale import measure

    return {"rows": [asdict(row) for row in measure(sizes, policies=("sia", "ours"), seed=0)]}


def _scale(document: Document, sizes: tuple[int, ...]) -> Part:
    rows = document["rows"]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
            of = [row for row in rows if row["policy"] == policy]
            gpus, line = [row["gpus"] for row in of], colour(policy, number)
            axes.plot(
                gpus, [row["decide_s"] for row in of], marker="o", color=line, label=f"{policy}: decision"
            )
            axes.plot(
                gpus,
                [row["lp_s"] for row in of],
                marker=".",
                ls=":",
                color=line,
                label=f"{policy}: relaxation",
            )
        axes.set(xscale="log", yscale="log", xlabel="GPUs (0.6 jobs each)", ylabel="seconds")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.legend(fontsize=8, frameon=False)

    return Part(
        key="scale",
        title="Scale",
        text="Seconds from a snapshot to a plan, beside HiGHS solving the linear relaxation of the same "
        "program; "
        "and what the decision gains against the bound that the relaxation gives. Times are those of the "
        "machine "
        "that made this page. Sia, Fig. 9.",
        workloads="seeded snapshots of three GPU types",
        commands=("pollux bench scale --gpus " + ",".join(map(str, sizes)),),
        draw=draw,
        head=("GPUs", "jobs", "policy", "decision", "relaxation", "gain / bound"),
        rows=[
            (
                f"{row['gpus']:,}",
                f"{row['jobs']:,}",
                row["policy"],
                f"{row['decide_s']:.3f} s",
                f"{row['lp_s']:.3f} s",
                f"{row['objective_ratio']:.5f}",
            )
            for row in rows
        ],
    )
