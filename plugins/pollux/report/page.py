"""The report as an HTML page beside its figures; no scripts, nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from pollux.report.counterexample import table
from pollux.report.figures import Results, draw, draw_counterexample, means
from pollux.report.sections import Section

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "code{background:#f4f4f4;padding:.1rem .3rem;overflow-wrap:anywhere}"
)


def write_report(folder: Path, sections: Sequence[Section], results: Results, *, title: str) -> Path:
    """Draw every figure and write ``index.html``; its path. Raises OSError."""
    parts = []
    for section in sections:
        draw(folder / f"{section.key}.svg", section, results)
        parts.append(_section(section, results))
    draw_counterexample(folder / "counterexample.svg")
    parts.append(_counterexample())
    links = "".join(f'<li><a href="#{section.key}">{escape(section.title)}</a></li>' for section in sections)
    page = folder / "index.html"
    page.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<ul>{links}<li><a href="#counterexample">Throughput alone misleads</a></li></ul>'
        + "".join(parts)
        + "</body></html>\n",
        encoding="utf-8",
    )
    return page


def _section(section: Section, results: Results) -> str:
    head = [section.axis, *(curve.label for curve in section.curves)]
    columns = means(section, results).values()
    rows = [
        [value or section.title, *("-" if hours is None else f"{hours:.3f} h" for hours in row)]
        for value, *row in zip(section.values, *columns, strict=True)
    ]
    return _part(section.key, section.title, section.text, head, rows, section.command)


def _counterexample() -> str:
    head = ["sigma", "batch size", "updates", "examples", "examples/s", "seconds to the target"]
    rows = [
        [
            f"{one.sigma:g}",
            str(one.batch_size),
            "never" if one.updates is None else str(one.updates),
            "-" if one.examples is None else str(one.examples),
            f"{one.examples_per_s:.0f}",
            "unreachable" if one.seconds is None else f"{one.seconds:.4f}",
        ]
        for one in table()
    ]
    text = (
        "A loss of w^2 / 2 with modelled times: larger batches always process more examples a second, and "
        "where gradients have little noise they take longer to the same loss. The best batch grows with "
        "the noise."
    )
    return _part("counterexample", "Throughput alone misleads", text, head, rows, "pollux report --out OUT")


def _part(
    key: str, title: str, text: str, head: Iterable[str], rows: Iterable[Iterable[str]], command: str
) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section id="{key}"><h2>{escape(title)}</h2><p>{escape(text)}</p>'
        f'<img src="{key}.svg" alt="{escape(title)}"><table><tr>{cells}</tr>{body}</table>'
        f"<p>Made by <code>{escape(command)}</code> and its like.</p></section>"
    )
