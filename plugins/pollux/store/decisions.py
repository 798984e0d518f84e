"""Decisions in an experiment of their own: one run a day and deployment, the decision number as the step."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from pollux.store.connection import Connection
from pollux.store.reading import MAX_ABS_VALUE
from pollux.store.runs import DEPLOYMENT_TAG, quoted

DAY_TAG = "pollux.day"
WALL_CLOCK = "wall_clock/"
"""Prefix of figures that a seed does not fix."""

MAX_DOCUMENT_CHARS = 65_536


class DecisionRuns:
    """The runs in which one deployment's decisions are recorded."""

    def __init__(self, connection: Connection, experiment_id: str, deployment: str) -> None:
        self._connection = connection
        self._experiment_id = experiment_id
        self._deployment = deployment

    def record(
        self,
        *,
        decision: int,
        now_unix_s: float,
        figures: Mapping[str, float],
        earlier: Mapping[int, Mapping[str, float]],
        wall_clock_s: Mapping[str, float],
        documents: Mapping[str, str],
    ) -> str:
        """Log the figures at step ``decision``, and documents that are small; the id of the run."""
        from mlflow.entities import Metric

        run_id = self._of_day(now_unix_s)
        apart = {WALL_CLOCK + name: value for name, value in wall_clock_s.items()}
        with self._connection.calling() as client:
            client.log_batch(
                run_id,
                metrics=[
                    Metric(name, float(value), int(now_unix_s * 1000), number)
                    for number, values in {**earlier, decision: {**figures, **apart}}.items()
                    for name, value in values.items()
                    if math.isfinite(value) and abs(value) <= MAX_ABS_VALUE
                ],
            )
            for name, text in documents.items():
                if len(text) <= MAX_DOCUMENT_CHARS:
                    client.log_text(run_id, text, f"decisions/{decision}/{name}")
        return run_id

    def newest(self) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Figures and wall-clock seconds of the last decision recorded, None before the first."""
        with self._connection.calling() as client:
            runs = client.search_runs(
                [self._experiment_id],
                f"tags.\"{DEPLOYMENT_TAG}\" = '{quoted(self._deployment)}'",
                max_results=1,
                order_by=["attributes.start_time DESC"],
            )
        if not runs:
            return None
        metrics: Mapping[str, float] = runs[0].data.metrics
        apart = {
            name.removeprefix(WALL_CLOCK): value
            for name, value in metrics.items()
            if name.startswith(WALL_CLOCK)
        }
        return {name: value for name, value in metrics.items() if not name.startswith(WALL_CLOCK)}, apart

    def _of_day(self, now_unix_s: float) -> str:
        """The day's run, made if there is none; runs of other days are closed."""
        day = datetime.fromtimestamp(now_unix_s, UTC).date().isoformat()
        running = self._connection.search(
            self._experiment_id,
            f"tags.\"{DEPLOYMENT_TAG}\" = '{quoted(self._deployment)}' and attributes.status = 'RUNNING'",
        )
        todays = [run.info.run_id for run in running if run.data.tags.get(DAY_TAG) == day]
        if todays:
            return str(todays[0])
        with self._connection.calling() as client:
            for run in running:
                client.set_terminated(run.info.run_id, status="FINISHED")
            made = client.create_run(
                self._experiment_id,
                start_time=int(now_unix_s * 1000),
                tags={DEPLOYMENT_TAG: self._deployment, DAY_TAG: day},
                run_name=f"decisions {self._deployment} {day}",
            )
        return str(made.info.run_id)
