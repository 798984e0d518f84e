"""Figures that a job's workers could not send to MLflow, sent by its driver once the job is over.

Nobody else can: the job's folder is on a volume that the scheduler does not mount.
"""

import logging
import threading
import time

from pollux_agent.protocol import JobFolder
from pollux_agent.report import MlflowReporter

logger = logging.getLogger(__name__)

TRY_FOR_S = 86_400.0
_CLOSE_S = 10.0


def send_left(
    folder: JobFolder,
    *,
    tracking_uri: str,
    run_id: str,
    incarnation: int,
    closing: threading.Event,
    try_for_s: float = TRY_FOR_S,
) -> bool:
    """Send them to the run, as soon as MLflow takes them; whether nothing is left.

    Tries until ``closing`` is set and some seconds more, ``try_for_s`` at most; what is left then stays in
    the folder, for the job's next incarnation.
    """
    if not folder.unsent.exists() or not tracking_uri or not run_id:
        return not folder.unsent.exists()
    logger.info("Sends to MLflow what the workers could not")
    reporter = MlflowReporter(tracking_uri, run_id, incarnation, flush_interval_s=0.0, unsent=folder.unsent)
    reporter.send_kept()
    until_s = time.monotonic() + try_for_s
    while not reporter.idle and not reporter.fenced and time.monotonic() < until_s:
        if closing.wait(0.5):
            break
    reporter.close(_CLOSE_S)
    return not folder.unsent.exists()
