"""Errors of the scheduler side, one tree.

::

    PolluxError
    ├── ConfigError          a setting or a cluster file is wrong: names field, value and fix; final
    ├── TraceError           a trace or workload file is wrong: names file, field and fix; final
    ├── SnapshotError        a saved snapshot or decision cannot be read; final
    ├── DecisionError        a decision breaks a rule of its snapshot, so nothing was done; final
    ├── ClusterError
    │   ├── ClusterUnavailable   the cluster does not answer; try again later
    │   ├── Conflict             a newer decision, or another holder of the lease, was there first
    │   ├── UnknownJob           the cluster has no such job; final
    │   │   └── DriverLost       nobody drives the job any more; submit it again
    │   └── Refused              the cluster refuses the request and says why; final
    ├── StoreError
    │   └── StoreUnavailable     MLflow does not answer; try again later
    ├── AirflowApiError      Airflow's REST API refuses a request and says why; final
    │   └── AirflowUnavailable   Airflow does not answer; try again later
    ├── StackError           a service of the local stack did not start or ended; says which log to read
    └── DemoError            the demo cannot go on; says in which phase, and which log to read
"""


class PolluxError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(PolluxError, ValueError):
    """A setting or a cluster file is wrong."""


class TraceError(PolluxError, ValueError):
    """A trace, workload or cluster file of a simulation is wrong."""


class SnapshotError(PolluxError, ValueError):
    """A saved snapshot or decision cannot be read."""


class DecisionError(PolluxError, ValueError):
    """A decision breaks a rule of its snapshot."""


class ClusterError(PolluxError):
    """Something went wrong between us and the cluster."""


class ClusterUnavailable(ClusterError):
    """The cluster does not answer; the same call may work later."""


class Conflict(ClusterError):
    """A newer decision, or another holder of the lease, was there first."""


class UnknownJob(ClusterError):
    """The cluster has no such job."""


class DriverLost(UnknownJob):
    """The job's driver is gone before the job was over; submitted again, it goes on from its checkpoint."""


class Refused(ClusterError):
    """The cluster refuses the request and says why."""


class StoreError(PolluxError):
    """Something went wrong between us and the model store."""


class StoreUnavailable(StoreError):
    """MLflow does not answer; the same call may work later."""


class AirflowApiError(PolluxError):
    """Airflow's REST API refuses a request and says why."""


class AirflowConflict(AirflowApiError):
    """What Airflow is asked to make is there already."""


class AirflowUnavailable(AirflowApiError):
    """Airflow does not answer; the same call may work later."""


class StackError(PolluxError):
    """A service of the local stack did not start, or ended."""


class DemoError(PolluxError):
    """The demo cannot go on."""
