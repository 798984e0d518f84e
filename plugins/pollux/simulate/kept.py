"""Simulations kept in a folder, one file each, so that a run of many goes on where it stopped."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pollux.simulate.reproduce import Case
from pollux.simulate.runner import News, simulate


def read_kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Each simulation's entry of results.json by the case's name; unreadable files are left out. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {}
    for path in sorted(folder.glob("*--seed*.json")):
        try:
            kept[path.stem] = dict(json.loads(path.read_text(encoding="utf-8"))["result"])
        except (ValueError, KeyError, TypeError):
            continue
    return kept


def simulate_and_keep(
    traces: Path,
    cases: Sequence[Case],
    folder: Path,
    *,
    processes: int | None,
    news: News,
    without: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Run the cases and keep each as soon as it ends, less the fields ``without``.

    Raises TraceError, OSError, and what a policy raises.
    """
    done = {}
    runs = [case.run(traces) for case in cases]
    for answer in simulate(runs, processes=processes, news=news) if runs else ():
        case = cases[answer.number]
        figures = {key: value for key, value in answer.result.items() if key not in without}
        text = json.dumps({"result": figures, "timing": answer.timing}, sort_keys=True, indent=1)
        part = folder / f"{case.name}.json.part"
        part.write_text(text + "\n", encoding="utf-8")
        part.rename(folder / f"{case.name}.json")
        done[case.name] = figures
    return done
