"""The report as an HTML page beside its figures; no scripts, nothing from elsewhere."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pollux.report.parts import Drawing, Part
from pollux.simulate.files import write_whole

_OPEN_ROWS = 12
"""Longer tables are folded."""

_STYLE = """
:root{--ink:#1d2733;--soft:#5b6775;--line:#e3e7ec;--tint:#f6f8fa;--accent:#0072b2}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);margin:0;display:grid;
  grid-template-columns:15rem minmax(0,54rem);gap:3rem;padding:0 2rem}
nav{position:sticky;top:0;align-self:start;height:100vh;overflow:auto;padding:2rem 0;font-size:.9rem}
nav strong{display:block;margin-bottom:.6rem}
nav a{display:block;padding:.15rem 0;color:var(--soft);text-decoration:none}
nav a:hover{color:var(--accent)}
main{padding:2rem 0 6rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .4rem}
h2{font-size:1.3rem;margin:0 0 .4rem}
section{border-top:1px solid var(--line);padding:1.6rem 0 1.2rem}
.data{color:var(--soft);font-size:.85rem;margin:.2rem 0 .8rem}
img{max-width:100%;height:auto;display:block;margin:.6rem 0}
details{margin:.5rem 0;font-size:.9rem}
summary{cursor:pointer;color:var(--accent)}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums;font-size:.88rem}
td,th{padding:.22rem .5rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0}
th{color:var(--soft);font-weight:600}
.wide{overflow-x:auto}
code{background:var(--tint);border:1px solid var(--line);border-radius:4px;padding:.1rem .35rem;
  font-size:.8rem;display:inline-block;margin:.12rem 0}
code span{white-space:nowrap}
@media(max-width:60rem){body{display:block;padding:0 1rem}nav{position:static;height:auto}}
"""


def write_report(folder: Path, parts: Sequence[Part], *, title: str, note: str) -> Path:
    """Draw every figure and write ``index.html``; its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        draw(folder / f"{part.key}.svg", part.draw)
    links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in parts)
    page = folder / "index.html"
    write_whole(
        page,
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<nav><strong>{escape(title)}</strong>{links}</nav>"
        f"<main><h1>{escape(title)}</h1><p>{escape(note)}</p>"
        + "".join(_section(part) for part in parts)
        + "</main></body></html>\n",
    )
    return page


def draw(path: Path, content: Drawing) -> None:
    """Save one figure as SVG, the same bytes each time; raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style = {
        "svg.hashsalt": "pollux",
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.axisbelow": True,
        "axes.edgecolor": "#9aa5b1",
    }
    with mpl.rc_context(style):
        figure = pyplot.figure(figsize=(8, 3.8), layout="constrained")
        content(figure)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _section(part: Part) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in part.head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows
    )
    first, *others = part.commands
    more = "".join(f"<br>{_command(each)}" for each in others)
    rest = f"<details><summary>and {len(others)} more</summary>{more[4:]}</details>" if others else ""
    folded = "" if len(part.rows) > _OPEN_ROWS else " open"
    return (
        f'<section id="{part.key}"><h2>{escape(part.title)}</h2><p>{escape(part.text)}</p>'
        f'<p class="data">Results from {escape(part.workloads)}</p>'
        f'<img src="{part.key}.svg" alt="{escape(part.title)}">'
        f"<details{folded}><summary>numbers</summary>"
        f'<div class="wide"><table><tr>{head}</tr>{body}</table></div></details>'
        f'<p class="data">Made by {_command(first)}</p>{rest}</section>'
    )


def _command(text: str) -> str:
    """A command that breaks between its words alone, and not at their hyphens."""
    return "<code>" + " ".join(f"<span>{escape(word)}</span>" for word in text.split()) + "</code>"
