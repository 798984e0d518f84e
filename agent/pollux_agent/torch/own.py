"""Objects of the user's own in the place of the agent's parts: that they can be asked what they will be."""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pollux_agent.errors import DocumentError


def check_own(
    argument: str,
    own: object,
    method: str,
    *,
    lacking: str,
    called: str,
    define: str,
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise DocumentError for an ``argument`` whose ``method`` cannot be called with what it will be given.

    ``lacking`` and ``define`` are the fixes, in words, for no such method and for another signature, and
    ``called`` the words for ``arguments`` and ``keywords``.
    """
    if isinstance(own, type):
        raise DocumentError(f"{argument}: {own.__name__} is a class; give an object, {own.__name__}()")
    bound = getattr(own, method, None)
    if not callable(bound):
        raise DocumentError(f"{argument}: {own!r} has no method `{method}`; {lacking}")
    try:
        signature = inspect.signature(bound)
    except (TypeError, ValueError):  # a function that says nothing of its arguments
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise DocumentError(
            f"{argument}: {type(own).__name__}.{method}{signature} cannot be called with {called} ({error}); "
            f"{define}"
        ) from None
