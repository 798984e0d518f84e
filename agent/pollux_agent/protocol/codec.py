"""How documents become JSON and come back: strict about types, clear about what is wrong.

Every document is a frozen, slotted, keyword-only pydantic dataclass with a ``schema`` number. A reader
refuses a document whose schema is newer than its own, and any field that it does not know.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pollux_agent.errors import DocumentError

DOCUMENT_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)

T = TypeVar("T")


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _adapter(kind: type) -> TypeAdapter[Any]:
    """Building an adapter takes milliseconds, so each is kept."""
    return _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))


def encode(document: object) -> str:
    """The document as one line of JSON with sorted keys, so that equal documents give equal text."""
    return encode_plain(to_plain(document))


def encode_plain(plain: Mapping[str, Any]) -> str:
    """What :func:`encode` makes of the document with these JSON-ready values; raises ValueError for NaN."""
    return _JSON.encode(plain)


def to_plain(document: object) -> dict[str, Any]:
    """The document as JSON-ready values (dict, list, str, int, float, bool, None)."""
    plain = _adapter(type(document)).dump_python(document, mode="json")
    assert isinstance(plain, dict)
    return plain


def decode(kind: type[T], text: str | bytes) -> T:
    """Read a document of class ``kind``.

    Raises DocumentError naming each wrong field, the value found and what is expected.
    """
    try:
        document: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise DocumentError(_explain(kind, error)) from None
    return document


def from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    """Read a document of class ``kind`` from JSON-ready values; raises as :func:`decode` does."""
    try:
        document: T = _adapter(kind).validate_python(plain)
    except ValidationError as error:
        raise DocumentError(_explain(kind, error)) from None
    return document


def _explain(kind: type, error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in item["loc"]) or "document"
        found = repr(item["input"])
        if len(found) > 120:
            found = found[:117] + "..."
        if item["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            problems.append(f"{field}: missing; add it")
        elif item["type"] == "literal_error" and item["loc"][-1:] == ("schema",):
            problems.append(
                f"{field}: version {found} is not one that this program reads; upgrade pollux-agent and "
                "airflow-provider-pollux to one version, the older of the two first"
            )
        elif item["type"] == "unexpected_keyword_argument":
            problems.append(f"{field}: unknown field; remove it or check its spelling")
        elif item["type"] == "value_error" and not item["loc"]:
            problems.append(item["msg"].removeprefix("Value error, "))
        else:
            message = item["msg"].removeprefix("Value error, ")
            problems.append(f"{field}: {message} (got {found})")
    return f"{kind.__name__}: " + "; ".join(problems)
