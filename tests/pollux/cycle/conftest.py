from mlflow_store import mlflow_uri, new_experiment, run_id

__all__ = ["mlflow_uri", "new_experiment", "run_id"]
