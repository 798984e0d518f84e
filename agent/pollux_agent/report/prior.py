"""What earlier runs of the same model have measured, for a job that has measured nothing yet."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pollux_agent.errors import DocumentError
from pollux_agent.model.throughput import ThroughputParams, is_sane
from pollux_agent.protocol import REPORT_TAG, Report, decode
from pollux_agent.report.client import connect, in_words

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

MODEL_PARAM = "model"
"""The MLflow parameter of a job's run that names what is trained."""

_CALL_TIMEOUT_S = 10
_MOST_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier runs of a model hand on: fits by GPU type, and up to how many GPUs they were measured.

    ``gpus_seen`` says it by type, where their reports know it; ``max_gpus_seen`` is the largest of all.
    """

    fits: Mapping[str, ThroughputParams]
    gpus_seen: Mapping[str, int]
    max_gpus_seen: int


def ask_for_prior(tracking_uri: str, run_id: str, give: Callable[[Earlier], None]) -> threading.Thread | None:
    """Look for earlier fits in a thread of its own, and ``give`` them, from there, if there are any.

    None where there is no run to look from. Training does not wait for it, and no fault reaches training.
    """
    if not tracking_uri or not run_id:
        return None

    def look() -> None:
        try:
            found = earlier_runs(connect(tracking_uri, timeout_s=_CALL_TIMEOUT_S), run_id)
        except Exception as error:  # noqa: BLE001 - the thread's outermost edge
            logger.info("no earlier run of this model was read: %s", in_words(error, tracking_uri))
            return
        if found is not None:
            give(found)

    thread = threading.Thread(target=look, name="pollux-prior", daemon=True)
    thread.start()
    return thread


def earlier_runs(client: "MlflowClient", run_id: str) -> Earlier | None:
    """What other runs of the same experiment that train the same model know; of each GPU type the newest fit.

    None for a run that names no model, and where no earlier fit can be used; raises what MLflow raises.
    """
    run = client.get_run(run_id)
    model = run.data.params.get(MODEL_PARAM, "")
    quote = "'" if "'" not in model else '"'
    if not model or quote in model:
        return None
    runs = client.search_runs(
        [run.info.experiment_id],
        filter_string=f"params.{MODEL_PARAM} = {quote}{model}{quote}",
        order_by=["attributes.start_time DESC"],
        max_results=_MOST_RUNS,
    )
    fits: dict[str, ThroughputParams] = {}
    gpus_seen: dict[str, int] = {}
    most = 0
    for other in runs:
        report = _report(other.data.tags.get(REPORT_TAG))
        if report is None or other.info.run_id == run_id:
            continue
        new = {kind: fit for kind, fit in report.fits.items() if kind not in fits and is_sane(fit)}
        if new:
            fits |= new
            gpus_seen |= {kind: num_gpus for kind, num_gpus in report.gpus_seen.items() if kind in new}
            most = max(most, report.max_gpus_seen)
    return Earlier(fits=fits, gpus_seen=gpus_seen, max_gpus_seen=most) if fits else None


def _report(text: str | None) -> Report | None:
    """The report, None where it cannot be read."""
    try:
        return decode(Report, text) if text is not None else None
    except DocumentError:
        return None
