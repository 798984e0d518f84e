"""The Pollux page in Airflow: gathered from the cluster and the last decision, rendered as HTML."""

import json
import time
from collections.abc import Iterable, Mapping
from html import escape

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.cluster.base import ClusterJob, ClusterView
from pollux.cluster.opening import open_cluster
from pollux.errors import ClusterError, ConfigError
from pollux.operators.links import mlflow_run_url
from pollux.record import Records
from pollux.settings import Settings
from pollux.snapshot import Decision
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, Placement, to_plain


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class NodeRow:
    name: str
    gpu_type: str
    gpus: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobRow:
    """``goodput`` is the last decision's prediction, in useful samples per second."""

    job_id: str
    name: str
    phase: str
    message: str
    placement: Placement
    min_gpus: int
    max_gpus: int
    goodput: float | None
    reason: str
    restarts: int
    age_s: float
    mlflow_run_url: str | None


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ClusterPage:
    """The whole page; ``problems`` says which of its sources did not answer."""

    time_unix_s: float
    decision: int | None = None
    policy: str = ""
    objective: float | None = None
    nodes: tuple[NodeRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    problems: tuple[str, ...] = Field(default=())


def gather(config: Settings) -> ClusterPage:
    """Read the cluster and the last decision; a source that is away becomes a problem, not an error."""
    now_s = time.time()
    problems = []
    try:
        view = open_cluster(config).observe()
    except (ClusterError, ConfigError) as error:
        view = ClusterView(nodes=(), jobs=())
        problems.append(f"The cluster does not answer: {error}")
    try:
        decision = Records(config.decisions).read_newest_decision()
    except (DocumentError, OSError) as error:
        decision = None
        problems.append(f"The last decision cannot be read: {error}")
    return ClusterPage(
        time_unix_s=now_s,
        decision=decision.decision if decision else None,
        policy=decision.policy if decision else "",
        objective=decision.objective if decision else None,
        nodes=tuple(_node_rows(view)),
        jobs=tuple(_job_row(job, decision, config, now_s) for job in view.jobs),
        problems=tuple(problems),
    )


def _node_rows(view: ClusterView) -> Iterable[NodeRow]:
    for node in view.nodes:
        held = sum(job.status.held.get(node.name, 0) for job in view.jobs)
        yield NodeRow(name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, held=held)


def _job_row(job: ClusterJob, decision: Decision | None, config: Settings, now_s: float) -> JobRow:
    decided = decision.jobs.get(job.job_id) if decision else None
    base_url = config.mlflow_url or config.mlflow_tracking_uri
    linked = job.mlflow_run_id and base_url.startswith(("http://", "https://"))
    return JobRow(
        job_id=job.job_id,
        name=job.spec.name,
        phase=job.status.phase,
        message=job.status.message,
        placement=dict(job.status.held or job.allocation.placement),
        min_gpus=job.spec.min_gpus,
        max_gpus=job.spec.max_gpus,
        goodput=decided.goodput if decided else None,
        reason=decided.reason if decided else job.allocation.reason,
        restarts=job.status.restarts,
        age_s=max(0.0, now_s - job.submitted_unix_s),
        mlflow_run_url=mlflow_run_url(base_url, str(job.mlflow_run_id)) if linked else None,
    )


_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1c2430;background:#fff}
h1{font-size:1.3rem;margin:0 0 .2rem}h2{font-size:1rem;margin:1.4rem 0 .4rem}
p.note{color:#5b6675;margin:0}
p.problem{background:#fdecea;color:#8a1c12;padding:.5rem .8rem;border-radius:4px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid #e3e7ec;vertical-align:top}
th{color:#5b6675;font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}
.slot{display:inline-block;width:.9rem;height:.9rem;border-radius:2px;margin-right:.2rem;background:#e3e7ec}
.slot.held{background:#2f6fdb}a{color:#1a5fd0}small{color:#5b6675}
@media (prefers-color-scheme:dark){body{background:#15191f;color:#dde3ea}th,p.note,small{color:#93a0b0}
th,td{border-color:#2c343e}.slot{background:#2c343e}a{color:#7fb0ff}}
"""

SCRIPT = """
for (const link of document.querySelectorAll("a[data-out]")) {
  link.addEventListener("click", event => {
    if (window.parent === window) return;
    event.preventDefault();
    const outer = parent.document.createElement("a");
    outer.href = link.href; outer.target = "_blank"; outer.rel = "noopener";
    outer.click();
  });
}
"""
"""Airflow shows the page in a frame that may not open windows, so its parent opens links to MLflow."""


def render(page: ClusterPage) -> str:
    """The page as HTML. Names, messages and reasons come from jobs and are escaped."""
    refreshed = time.strftime("%H:%M:%S", time.localtime(page.time_unix_s))
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pollux cluster</title>'
        f'<meta http-equiv="refresh" content="5"><style>{_STYLE}</style></head><body><h1>Pollux cluster</h1>'
    )
    decision = (
        f"decision {page.decision} by policy {escape(page.policy)}, objective {page.objective:.3g}"
        if page.decision is not None and page.objective is not None
        else "no decision yet"
    )
    problems = "".join(f'<p class="problem">{escape(text)}</p>' for text in page.problems)
    nodes = "".join(_node_html(node) for node in page.nodes)
    jobs = "".join(_job_html(job) for job in page.jobs) or '<tr><td colspan="9">No job is active.</td></tr>'
    return (
        f'{head}<p class="note">{decision}; read at {refreshed}</p>{problems}'
        f"<h2>Nodes</h2><table><tr><th>Node</th><th>GPU type</th><th>GPUs held</th></tr>{nodes}</table>"
        "<h2>Jobs</h2><table><tr><th>Job</th><th>Phase</th><th>GPUs</th><th>Bounds</th>"
        "<th>Predicted goodput, samples/s</th><th>Why</th><th>Restarts</th><th>Age</th><th>MLflow</th></tr>"
        f'{jobs}</table><script src="page.js"></script></body></html>'
    )


def _node_html(node: NodeRow) -> str:
    slots = '<span class="slot held"></span>' * node.held
    slots += '<span class="slot"></span>' * max(0, node.gpus - node.held)
    return (
        f"<tr><td>{escape(node.name)}</td><td>{escape(node.gpu_type)}</td>"
        f"<td>{slots} {node.held} of {node.gpus}</td></tr>"
    )


def _job_html(job: JobRow) -> str:
    run = f'<a data-out href="{escape(job.mlflow_run_url)}">run</a>' if job.mlflow_run_url else "not yet"
    goodput = "not known yet" if job.goodput is None else f"{job.goodput:,.0f}"
    return (
        f"<tr><td>{escape(job.name)}<br><small>{escape(job.job_id)}</small></td>"
        f"<td>{escape(job.phase)}<br><small>{escape(job.message)}</small></td>"
        f"<td>{_placement(job.placement)}</td><td>{job.min_gpus} to {job.max_gpus}</td>"
        f'<td class="n">{goodput}</td><td>{escape(job.reason)}</td><td class="n">{job.restarts}</td>'
        f'<td class="n">{_age(job.age_s)}</td><td>{run}</td></tr>'
    )


def _placement(placement: Mapping[str, int]) -> str:
    return "<br>".join(f"{escape(node)}: {gpus}" for node, gpus in placement.items()) or "0"


def _age(age_s: float) -> str:
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def page_json(page: ClusterPage) -> str:
    """The page's figures for programs."""
    return json.dumps(to_plain(page), allow_nan=False)
