"""Pollux for Airflow: goodput-optimal scheduling of PyTorch training jobs.

Importing this package costs nothing: Airflow is imported only by the modules at the rim (``operators``,
``triggers``, ``airflow_plugin``, ``provider_info``).
"""

__version__ = "0.1.0"
