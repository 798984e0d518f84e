"""``pollux-agent bench overhead``: what the agent adds to a training loop."""

from pathlib import Path
from typing import Annotated

import typer

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write

BAR, EVERY_STEP_BAR = 1.03, 1.08


@bench.command()
def overhead(
    seconds: Annotated[
        float, typer.Option(min=1, help="Wall time of a plain run, at least 40 to count.")
    ] = 42,
    pairs: Annotated[int, typer.Option(min=1, max=15, help="Pairs of runs at least.")] = 5,
    most_pairs: Annotated[int, typer.Option(min=1, help="Pairs at most, while it is too noisy.")] = 15,
    only: Annotated[
        list[str] | None, typer.Option(help="cnn_1rank, cnn_2rank, transformer_1rank, transformer_2rank.")
    ] = None,
    every_step: Annotated[bool, typer.Option(help="Also with the noise scale at every step.")] = True,
    peers: Annotated[Path, typer.Option(help="The environment of `make peers`.")] = Path(".peers"),
    cpu: Annotated[
        bool,
        typer.Option(help="Compare CPU time, for a machine with other work; the bars are for wall time."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the wall time of the same steps under the agent and under plain torch.

    The agent trains as a driver starts it: noise scale at least every 10 steps, report and fit every 15 s
    to a tracking server, checkpoints every 30 s. The runs of a pair take turns of a quarter of a second,
    each with the machine to itself meanwhile. Fails above 1.03, above 1.08 with the noise scale at every
    step, and where plain runs differ among themselves by more than 1 % ("too noisy").
    """
    from pollux_agent.bench.overhead_runs import CASES, Bench

    chosen = only or list(CASES)
    for name in chosen:
        if name not in CASES:
            typer.echo(f"--only: no case {name!r}; use one of {', '.join(CASES)}", err=True)
            raise typer.Exit(2)
    python = peers / "bin" / "python"
    if not python.exists():
        typer.echo(
            f"{python} is not there, so the adaptdl column is left out; `make peers` makes it", err=True
        )
    clock = "cpu" if cpu else "wall"
    with Bench(seconds=seconds, pairs=pairs, most_pairs=max(pairs, most_pairs), clock=clock) as measure:
        figures: dict[str, object] = {}
        failed = False
        for name in chosen:
            ratios = measure.case(
                name,
                ("agent", "every") if every_step else ("agent",),
                told=lambda line: typer.echo(line, err=True),
            )
            figures |= {
                f"{name}_ratio": round(ratios.medians["agent"], 4),
                f"{name}_plain_ratio": round(ratios.baseline, 4),
                f"{name}_step_ms": round(measure.step_ms(name), 2),
                f"{name}_pairs": ratios.num_pairs,
            }
            failed |= ratios.too_noisy or ratios.medians["agent"] > BAR
            if every_step:
                figures[f"{name}_every_step_ratio"] = round(ratios.medians["every"], 4)
                failed |= ratios.medians["every"] > EVERY_STEP_BAR
            if ratios.too_noisy:
                typer.echo(f"{name}: too noisy, plain against plain is {ratios.baseline:.3f}", err=True)
            if python.exists():
                peer = measure.case(
                    name, ("adaptdl",), python=python, told=lambda line: typer.echo(line, err=True)
                )
                figures[f"adaptdl_{name}_ratio"] = round(peer.medians["adaptdl"], 4)
    write(figures, "\n".join(f"{name:<36} {value}" for name, value in figures.items()), as_json=as_json)
    raise typer.Exit(int(failed))
