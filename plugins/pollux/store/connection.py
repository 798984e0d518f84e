"""The one place where MLflow is called from: connects late, and turns its errors into ours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from pollux.errors import StoreError, StoreUnavailable
from pollux_agent.report.client import connect, in_words, is_passing, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_CALL_TIMEOUT_S = 5
_PAGE_RUNS = 200
"""Small pages keep each call well within its time limit."""


class Connection:
    """MLflow at ``tracking_uri``; the first use imports mlflow, which takes a second."""

    def __init__(self, tracking_uri: str) -> None:
        self._tracking_uri = tracking_uri

    @cached_property
    def _client(self) -> "MlflowClient":
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our output may be JSON
        return connect(self._tracking_uri, timeout_s=_CALL_TIMEOUT_S)

    @contextmanager
    def calling(self) -> Iterator["MlflowClient"]:
        """The client; raises StoreUnavailable where a later try may help, else StoreError."""
        where = without_password(self._tracking_uri)
        try:
            client = self._client
        except Exception as error:  # noqa: BLE001 - the database driver's own errors come out here
            raise StoreUnavailable(f"MLflow at {where} cannot be opened: {self._words(error)}") from None
        from mlflow.exceptions import MlflowException

        try:
            yield client
        except (MlflowException, OSError) as error:
            if is_passing(error):
                raise StoreUnavailable(f"MLflow at {where} does not answer: {self._words(error)}") from None
            raise StoreError(f"MLflow at {where} refuses: {self._words(error)}") from None

    def _words(self, error: Exception) -> str:
        return in_words(error, self._tracking_uri)

    def experiment(self, name: str) -> str:
        """The id of the experiment ``name``, made if there is none."""
        from mlflow.exceptions import MlflowException

        with self.calling() as client:
            for _ in range(2):
                found = client.get_experiment_by_name(name)
                if found is not None and found.lifecycle_stage != "active":
                    raise StoreError(
                        f"MLflow experiment {name!r} is deleted; restore it (mlflow experiments restore "
                        f"-x {found.experiment_id}) or set another name"
                    )
                if found is not None:
                    return str(found.experiment_id)
                try:
                    return str(client.create_experiment(name))
                except MlflowException as error:
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
            raise StoreUnavailable(f"MLflow experiment {name!r} is being made by somebody else")

    def search(self, experiment_id: str, filter_string: str) -> "list[Run]":
        """All runs that match, however many; the oldest first."""
        runs: list[Run] = []
        token = None
        while True:
            with self.calling() as client:
                page = client.search_runs(
                    [experiment_id],
                    filter_string,
                    max_results=_PAGE_RUNS,
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
            runs.extend(page)
            token = page.token
            if not token:
                return runs
