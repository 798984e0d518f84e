from airflow_rim import cluster, context, state  # noqa: F401
