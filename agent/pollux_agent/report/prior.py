"""The fit of an earlier run of the same model, for a job that has measured nothing yet."""

import logging
import threading
from collections.abc import Callable
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


def ask_for_prior(
    tracking_uri: str, run_id: str, gpu_type: str, give: Callable[[ThroughputParams], None]
) -> threading.Thread | None:
    """Look for an earlier fit in a thread of its own, and ``give`` it if there is one.

    None where there is no run to look from. Training does not wait for it, and no fault reaches training.
    """
    if not tracking_uri or not run_id:
        return None

    def look() -> None:
        try:
            found = earlier_fit(connect(tracking_uri, timeout_s=_CALL_TIMEOUT_S), run_id, gpu_type)
        except Exception as error:  # noqa: BLE001 - the thread's outermost edge
            logger.info("no earlier run of this model was read: %s", in_words(error, tracking_uri))
            return
        if found is not None:
            logger.info("the fit of an earlier run of this model is the prior on %s", gpu_type)
            give(found)

    thread = threading.Thread(target=look, name="pollux-prior", daemon=True)
    thread.start()
    return thread


def earlier_fit(client: "MlflowClient", run_id: str, gpu_type: str) -> ThroughputParams | None:
    """The newest usable fit on ``gpu_type`` of another run of the same experiment that trains the same model.

    None for a run that names no model, and where no earlier report can be read; raises what MLflow raises.
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
    for other in runs:
        if other.info.run_id != run_id and (fit := _fit(other.data.tags.get(REPORT_TAG), gpu_type)):
            return fit
    return None


def _fit(report: str | None, gpu_type: str) -> ThroughputParams | None:
    """The report's fit on ``gpu_type``, None where it cannot be read or cannot be."""
    try:
        fit = decode(Report, report).fits.get(gpu_type) if report is not None else None
    except DocumentError:
        return None
    return fit if fit is not None and is_sane(fit) else None
