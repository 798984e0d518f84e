"""``pollux-agent bench tune``: how fast and how close to the best the search for (m, s) is."""

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write


@bench.command()
def tune(as_json: JsonOption = False) -> None:
    """Time the search for the best batch split, and compare it with every split there is."""
    from pollux_agent.bench.tuning import measure

    figures = measure()
    lines = [f"{name:<14} {value:12.6g}" for name, value in figures.items()]
    write(figures, "\n".join(lines), as_json=as_json)
