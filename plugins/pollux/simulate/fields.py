"""What the fields of kept documents may hold."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AllowInfNan, Field

Count = Annotated[int, Field(ge=0)]
Figure = Annotated[float, Field(ge=0), AllowInfNan(allow_inf_nan=False)]


def check_columns(*columns: Sequence[float]) -> None:
    """Raise ValueError where the columns of a table have not all the same length."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError("its columns differ in length; each has a value for every round")
