"""The Pollux agent: the part of Pollux that lives inside a training script.

Importing this package costs nothing: torch is imported only by :mod:`pollux_agent.torch`, and MLflow only
by :mod:`pollux_agent.report`.
"""

__version__ = "0.1.0"
