"""The sections of the report that simulate workloads."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.policy.ablation import ABLATION
from pollux.report.sections import Section, Workloads
from pollux.simulate.reproduce import INTERVALS_S, LOADS
from pollux.snapshot import DEFAULT_RESTART_S

QUICK_JOBS = 16
"""Jobs of each workload in a quick report."""

ORDER = (
    "counterexample",
    "policies",
    "load",
    "interval",
    "interference",
    "fairness",
    "time",
    "co-adaptation",
    "restarts",
    "restart-cost",
    "fits",
    "autoscaling",
    "types",
    "one-type",
    "sia-p",
    "sia-interval",
    "rate",
    "ablation",
    "ablation-types",
    "scale",
)
"""Keys of all sections, in the page's order."""

_KNOBS = (1.0, -1.0, -10.0)
_SIA_KNOBS = (-1.0, -0.5, 0.5, 1.0)
_SIA_INTERVALS_S = (30.0, 60.0, 120.0, 300.0)
_RATES = (10, 20, 30, 40, 50)


def sections(traces: Path, names: Sequence[str], *, quick: bool = False) -> list[Section]:
    """The sections for which the folder has workloads of these names; fewer points where ``quick``."""
    here = Workloads(traces, names, QUICK_JOBS if quick else None)
    found = [*_of_pollux(here, quick=quick), *_of_sia(here, quick=quick), *_of_ours(here, quick=quick)]
    return [section for section in found if section is not None]


def _policies(*names: str, **options: Any) -> Mapping[str, Mapping[str, Any]]:
    return {name: {"policy": name, **options} for name in names}


def _of_pollux(here: Workloads, *, quick: bool) -> Iterator[Section | None]:
    main = here.one_of("philly-1.0", "synthetic")
    tuned = {"tuned": "philly-1.0", "realistic": "philly-realistic", "synthetic": "synthetic"}
    yield here.over_sets(
        "policies",
        "Completion times by policy",
        "Tuned requests (philly-1.0) are those of experts; realistic ones (philly-realistic) those of users "
        "who tune nothing. Policies that adapt jobs look at neither. Pollux, Table 2.",
        "bars",
        "requests",
        tuned,
        _policies("tiresias", "optimus", "optimus-scaling", "pollux", "sia", "ours"),
    )
    loads = LOADS[1:3] if quick else LOADS
    yield here.over_sets(
        "load",
        "Load",
        "More jobs in the same hours. The paper saw every policy slow down, and those that adapt jobs stay "
        "ahead by the same factor. Pollux, Fig. 8a.",
        "lines",
        "load",
        {load: f"philly-{load}" for load in loads},
        _policies("tiresias", "optimus", "pollux", "ours"),
    )
    seconds = (60.0, 480.0) if quick else sorted([60.0, *INTERVALS_S.values()])
    yield here.over_settings(
        "interval",
        "Scheduling interval",
        "Deciding more seldom leaves allocations standing that do not fit any more. Pollux, Fig. 8b.",
        "interval (s)",
        main,
        {f"{each:g}": {} if each == 60.0 else {"interval_s": each} for each in seconds},
        _policies("pollux", "ours"),
    )
    shares = (0.0, 0.5) if quick else (0.0, 0.25, 0.5)
    yield here.over_settings(
        "interference",
        "Interference",
        "What jobs that span nodes lose where they meet on a node, if nothing keeps them apart; with "
        "avoidance they never meet, so that line is level. Pollux, Fig. 8c.",
        "share of goodput lost",
        main,
        {f"{share:.0%}": {"interference": share} if share else {} for share in shares},
        {
            "kept apart": {"policy": "pollux"},
            "not kept apart": {"policy": "pollux", "avoid_interference": False},
        },
    )
    yield here.over_sets(
        "fairness",
        "The fairness knob",
        "Finish-time fairness rho: how long a job took against how long it would have taken alone on its "
        "share. Above 1 it did worse. Steep and to the left is fair. Pollux, Fig. 7.",
        "fairness",
        "rho",
        {"": main},
        {
            **{f"pollux, p = {p:g}": {"policy": "pollux", "fairness_p": p} for p in _KNOBS},
            **_policies("tiresias", "optimus"),
        },
    )
    yield here.over_sets(
        "time",
        "Allocation and efficiency over time",
        "GPUs in use, and how much of their work counts. Few jobs: many GPUs each, large batches, lower "
        "efficiency; many jobs: the reverse. Pollux, Fig. 5.",
        "timeline",
        "hours",
        {"": main},
        _policies("optimus", "pollux", "ours"),
    )
    yield here.over_sets(
        "restarts",
        "Restarts",
        "How often a running job is re-allocated, and what part of the GPU time goes into that. The paper "
        "reports one in 7 minutes, and 8 % of the time. Pollux, section 5.2.",
        "restarts",
        "policy",
        {"": main},
        _policies("optimus", "pollux", "sia", "ours"),
    )
    delays = (30.0, 120.0) if quick else (15.0, 30.0, 60.0, 120.0)
    yield here.over_settings(
        "restart-cost",
        "What a restart costs",
        "Every restart takes so many seconds, which the policies learn from the first one. Pollux, section "
        "4.2, reports 15 to 120 s and assumes 30 s.",
        "seconds a restart",
        main,
        {f"{each:g}": {} if each == DEFAULT_RESTART_S else {"restart_s": each} for each in delays},
        _policies("pollux", "ours"),
    )
    yield here.over_sets(
        "fits",
        "Seeded fits",
        "Jobs that start from the fits of finished jobs of the same model, against jobs that start from "
        "nothing: mean completion time by application, as a ratio. Pollux, section 5.3.2, saw 2 to 5 % for "
        "short jobs and nothing for long ones.",
        "applications",
        "start from",
        {"": main},
        {
            f"{name}, {words}": {"policy": name, "earlier_fits": fits}
            for name in ("pollux", "ours")
            for fits, words in ((False, "from nothing"), (True, "from earlier fits"))
        },
    )


def _of_sia(here: Workloads, *, quick: bool) -> Iterator[Section | None]:
    sets = ("sia-philly",) if quick else ("sia-philly", "sia-helios", "sia-newtrace")
    yield here.over_sets(
        "types",
        "Three types of GPU",
        "Sia's cluster of 64 GPUs of three types. pollux takes them for equal, gavel leaves jobs at their "
        "requests. Sia, Table 3.",
        "bars",
        "workloads",
        {name: name for name in sets},
        _policies("gavel", "pollux", "sia", "ours", cluster="sia"),
    )
    yield here.over_sets(
        "one-type",
        "One type of GPU",
        "Jobs that adapt against jobs at their tuned requests, where all GPUs are alike. Sia, Table 4.",
        "bars",
        "workloads",
        {name: name for name in ("philly-1.0", "synthetic")},
        _policies("gavel", "themis", "shockwave", "pollux", "sia", "ours"),
    )
    hetero = here.one_of("sia-philly")
    where = {"cluster": "sia"} if hetero else {}
    main = hetero or here.one_of("synthetic")
    knobs = (-0.5, 1.0) if quick else _SIA_KNOBS
    yield here.over_settings(
        "sia-p",
        "Sia's fairness knob",
        "The power p of normalised goodput. The paper chose -0.5. Sia, Fig. 10.",
        "p",
        main,
        {f"{p:g}": {"fairness_p": p} for p in knobs},
        _policies("sia", **where),
    )
    seconds = (60.0, 300.0) if quick else _SIA_INTERVALS_S
    yield here.over_settings(
        "sia-interval",
        "Sia's round",
        "Seconds between decisions. The paper saw 12 % from 60 s to 300 s. Sia, Fig. 10.",
        "interval (s)",
        main,
        {f"{each:g}": {} if each == 60.0 else {"interval_s": each} for each in seconds},
        _policies("sia", "ours", **where),
    )
    rates = _RATES[:2] if quick else _RATES
    yield here.over_sets(
        "rate",
        "Arrival rate",
        "Jobs an hour on the cluster of three types. Sia, Fig. 7.",
        "lines",
        "jobs an hour",
        {str(rate): f"sia-rate-{rate}" for rate in rates},
        _policies("gavel", "sia", "ours", cluster="sia"),
    )


def _of_ours(here: Workloads, *, quick: bool) -> Iterator[Section | None]:
    variants: Mapping[str, Mapping[str, Any]] = {
        "ours": {"policy": "ours"},
        "with fits of earlier runs": {"policy": "ours", "earlier_fits": True},
        **{each.words: {"policy": each.name} for each in ABLATION},
        "jobs may meet on a node": {"policy": "ours", "avoid_interference": False},
    }
    yield here.over_sets(
        "ablation",
        "What each ingredient of ours brings",
        "Our policy with one thing added or taken away, or told wrong.",
        "bars",
        "workloads",
        {name: name for name in ("philly-1.0", "synthetic")},
        variants,
    )
    if here.one_of("sia-philly") and not quick:
        yield here.over_sets(
            "ablation-types",
            "The same on three types of GPU",
            "Restarts cost from 15 s to 250 s there, so knowing each job's own cost counts.",
            "bars",
            "workloads",
            {"sia-philly": "sia-philly"},
            {label: {**options, "cluster": "sia"} for label, options in variants.items()},
        )
