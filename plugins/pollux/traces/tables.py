"""Reading the CSV files of a trace folder, which nobody vouches for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from pollux.errors import TraceError

_MAX_BYTES = 64 * 2**20

MOST = 1e30
"""Larger than anything that can be measured, and small enough to be calculated with."""


def read_table(path: Path, *, numbers: Sequence[str], texts: Sequence[str] = ()) -> pd.DataFrame:
    """The columns asked for; ``numbers`` are from 0 to MOST, ``texts`` not empty.

    A row's index is two less than the number of its line. Raises TraceError naming the file and the line or
    column.
    """
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is no file; give a CSV file")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TraceError(f"{path}: larger than {_MAX_BYTES // 2**20} MiB; this is no trace file")
        table = pd.read_csv(
            path,
            dtype=dict.fromkeys(texts, str),
            encoding="utf-8",
            keep_default_na=False,
            skip_blank_lines=False,  # so that a row's place is its line
        )
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; --traces names a folder with it") from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TraceError(
            f"{path}: cannot be read as CSV: {str(error).strip()}; give a header and a line a row"
        ) from None
    if not isinstance(table.index, pd.RangeIndex):
        raise TraceError(f"{path}: its rows have more fields than its header; give each field a column")
    missing = [name for name in (*texts, *numbers) if name not in table.columns]
    if missing:
        raise TraceError(
            f"{path}: column {missing[0]!r} is missing; it has {', '.join(map(str, table.columns))}"
        )
    twice = [name for name in (*texts, *numbers) if f"{name}.1" in table.columns]
    if twice:
        raise TraceError(f"{path}: column {twice[0]!r} is there twice; leave one of them out")
    table = table[~table.astype(str).eq("").all(axis=1)]
    if table.empty:
        raise TraceError(f"{path}: holds no row below its header")
    table = table[[*texts, *numbers]].copy()
    for name in numbers:
        if table[name].dtype == np.bool_:  # what pandas makes of a column of True and False
            table[name] = table[name].astype(str)
        values = pd.to_numeric(table[name], errors="coerce").astype(np.float64)
        _refuse(path, name, table[name], ~np.isfinite(values.to_numpy()), "a finite number")
        _refuse(path, name, table[name], values.to_numpy() < 0, "0 or more")
        _refuse(path, name, table[name], values.to_numpy() > MOST, f"at most {MOST:g}")
        table[name] = values
    for name in texts:
        _refuse(path, name, table[name], (table[name].str.strip() == "").to_numpy(), "not empty")
    return table


def _refuse(path: Path, name: str, column: "pd.Series[object]", wrong: np.ndarray, must: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TraceError(
            f"{path}, line {column.index[row] + 2}: {name} is {str(column.iloc[row])[:80]!r}; "
            f"it must be {must}"
        )
