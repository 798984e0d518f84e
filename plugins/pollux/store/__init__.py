"""The model store: MLflow holds one run per job and, in it, the report that the job's agent writes."""

from pollux.store.reading import JobRecord, read_report
from pollux.store.store import ModelStore, RunStatus

__all__ = ["JobRecord", "ModelStore", "RunStatus", "read_report"]
