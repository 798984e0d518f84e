-- The second database beside Airflow's own.
CREATE DATABASE mlflow OWNER pollux;
