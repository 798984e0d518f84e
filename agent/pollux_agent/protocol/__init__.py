"""Documents that cross between the agent and the scheduler, each with its schema version; no torch here."""

from pollux_agent.protocol.allocation import (
    MAX_DECISION,
    Allocation,
    DecisionNumber,
    Placement,
    read_decision,
)
from pollux_agent.protocol.codec import DOCUMENT_CONFIG, decode, encode, encode_plain, from_plain, to_plain
from pollux_agent.protocol.event import DriverEvent, Event
from pollux_agent.protocol.identity import JobIdentity
from pollux_agent.protocol.layout import JobFolder
from pollux_agent.protocol.outcome import Outcome, Unsaved
from pollux_agent.protocol.report import MAX_REPORT_CHARS, REPORT_TAG, Report
from pollux_agent.protocol.spec import (
    DEFAULT_MAX_BATCH_FACTOR,
    ESTIMATOR_PATTERN,
    JobKind,
    JobSpec,
    ScalingRule,
)

__all__ = [
    "DEFAULT_MAX_BATCH_FACTOR",
    "DOCUMENT_CONFIG",
    "ESTIMATOR_PATTERN",
    "MAX_DECISION",
    "MAX_REPORT_CHARS",
    "REPORT_TAG",
    "Allocation",
    "DecisionNumber",
    "DriverEvent",
    "Event",
    "JobFolder",
    "JobIdentity",
    "JobKind",
    "JobSpec",
    "Outcome",
    "Placement",
    "Report",
    "ScalingRule",
    "Unsaved",
    "decode",
    "encode",
    "encode_plain",
    "from_plain",
    "read_decision",
    "to_plain",
]
