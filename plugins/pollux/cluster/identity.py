"""A job's name on the cluster and in MLflow, made from which task instance it is and never from the try."""

import hashlib
import re

from pollux.cluster.base import JobIdentity
from pollux_agent.protocol import encode

_MAX_SLUG = 40


def job_id(identity: JobIdentity, name: str) -> str:
    """A DNS label of at most 51 characters: the name for people, ten hex digits of the identity's hash."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_SLUG].strip("-") or "job"
    return f"{slug}-{hashlib.sha256(encode(identity).encode()).hexdigest()[:10]}"
