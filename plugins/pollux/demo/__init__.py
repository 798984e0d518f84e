"""``pollux demo``: three real trainings share a small cluster under Airflow, and the run checks itself."""
