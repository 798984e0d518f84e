"""What a check found out, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``detail`` is one line for people; ``fix`` the exact rule, value or command to add, empty where all is
    well. A warning is worth knowing and stops nothing.
    """

    check: str
    status: Status
    detail: str
    fix: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, status="ok", detail=detail)


def warning(check: str, detail: str, fix: str = "") -> Finding:
    return Finding(check=check, status="warning", detail=detail, fix=fix)


def failed(check: str, detail: str, fix: str = "") -> Finding:
    return Finding(check=check, status="failed", detail=detail, fix=fix)
