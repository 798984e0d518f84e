"""The driver: turns a job's allocation into running workers; knows no torch, no Airflow and no Kubernetes.

:mod:`machine` is the state machine, a pure function; :mod:`driver` observes, asks it and does what it says,
over whatever starts workers (:class:`Workers`).
"""

from pollux_agent.driver.driver import Driver, Workers
from pollux_agent.driver.machine import FINAL_PHASES, Start, Timing
from pollux_agent.driver.state import DriverState, Phase, StopReason

__all__ = ["FINAL_PHASES", "Driver", "DriverState", "Phase", "Start", "StopReason", "Timing", "Workers"]
