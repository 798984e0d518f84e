"""The MLflow client with limits of ours, and which of its errors pass by themselves."""

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_COMMON = {
    "Connection refused": "connection refused",
    "failed with timeout exception": "no answer in time",
    "timed out": "no answer in time",
    "Failed to resolve": "its host name is not known",
}
_MAX_WORDS = 300
_PASSING_STATUS = frozenset({401, 403, 404, 408, 409, 429, 499})
"""Log-in and rights too: what stands before a server may have lost them for a while."""


def connect(tracking_uri: str, *, timeout_s: int) -> "MlflowClient":
    """A client one of whose calls ends within about ``timeout_s``; imports mlflow, which takes a second.

    MLflow reads its HTTP limits from the environment alone, so they are set there, each only where the
    user has not: without them one call may retry for minutes. Retries are the caller's. User and password of
    the URI go there too, since MLflow prints the addresses of runs.
    """
    address, own = _without_user(tracking_uri)
    for name, value in {**_LIMITS, "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s), **own}.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=address)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may work later: no connection, a busy or broken server, a locked database."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, OSError):
        return True
    if not isinstance(error, MlflowException):
        return False
    if is_missing(error):
        return False
    status = int(error.get_http_status_code())
    return status >= 500 or status in _PASSING_STATUS


def is_missing(error: BaseException) -> bool:
    """Whether MLflow says that the run (or another thing asked for) does not exist."""
    return error_code(error) == "RESOURCE_DOES_NOT_EXIST"


def error_code(error: BaseException) -> str:
    """MLflow's name of the error, empty for any other exception."""
    code: Any = getattr(error, "error_code", "")
    return code if isinstance(code, str) else ""


def in_words(error: BaseException, tracking_uri: str) -> str:
    """The error's message in one short line, without the password that the URI may hold."""
    text = " ".join(str(error).split()).replace(tracking_uri.rstrip("/"), without_password(tracking_uri))
    for sign, words in _COMMON.items():
        if sign in text:
            return words
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 3] + "..."


def _without_user(tracking_uri: str) -> tuple[str, dict[str, str]]:
    """An HTTP address without user and password, and these as MLflow's variables."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https") or "@" not in parts.netloc:
        return tracking_uri, {}
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return bare, {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def without_password(tracking_uri: str) -> str:
    """The URI with user and password left out."""
    parts = urlsplit(tracking_uri)
    if "@" not in parts.netloc:
        return tracking_uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
