"""Whole pages as HTML: a run, all runs of a folder, and a page that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from paceline.observe.dash.page_parts import PARTS, STYLES
from paceline.observe.live.glance import Glance
from paceline.report.drawn.markup import esc, pill
from paceline.report.format import signed_percent
from paceline.report.style import CSS
from paceline.units import format_loss, format_seconds

STYLE = (
    CSS
    + """
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:1rem;background:var(--bg);padding:.5rem}
.bar{position:sticky;top:0;z-index:2;background:var(--bg);border-bottom:1px solid var(--line);
display:flex;flex-wrap:wrap;gap:.3rem 1rem;align-items:center;padding:.45rem 1.5rem;font-size:.86rem}
.bar p{margin:0;color:var(--soft)}.bar button,form button{font:inherit;color:var(--ink);background:var(--panel);
border:1px solid var(--line);border-radius:.4rem;padding:.25rem .8rem;cursor:pointer}
a{color:var(--train)}:focus-visible{outline:2px solid var(--train);outline-offset:2px}
main.wide{max-width:100rem;padding-top:1.2rem;display:grid;gap:0 3rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,36rem),1fr))}
main.wide>header,main.wide>footer,#head,#alerts,#cards,#decisions,#faults,#logs{grid-column:1/-1}
#runs td{white-space:nowrap}
#runs td:nth-child(3){white-space:normal;overflow-wrap:anywhere;min-width:11rem;max-width:26rem}
#runs td:nth-child(4){max-width:14rem;overflow:hidden;text-overflow:ellipsis}
#runs td:last-child{max-width:34rem;overflow:hidden;text-overflow:ellipsis}
.tools{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:center;position:sticky;top:2.9rem;z-index:1;
background:var(--bg);padding:.4rem 0;margin:0}.tools input{font:inherit;color:var(--ink);background:var(--panel);
border:1px solid var(--line);border-radius:.4rem;padding:.25rem .6rem;width:16rem;max-width:60vw}
main.wide>form{grid-column:1/-1;min-width:0}
main.wide>header{margin-bottom:0}main.wide h2{margin-top:1.2rem}main.wide section{min-width:0}
section[hidden]{display:none}.part>h2:empty{display:none}
progress{width:100%;height:.6rem;accent-color:var(--expected)}
.f-good{fill:var(--expected)}.f-bad{fill:var(--bad)}.f-none{fill:var(--c6)}.lane{fill:var(--grid)}
.heat{fill:var(--held)}.h0{opacity:.12}.h1{opacity:.25}.h2{opacity:.4}.h3{opacity:.6}.h4{opacity:.8}.h5{opacity:1}
nav.ranks a{margin-right:.7rem}nav.ranks a[aria-current]{font-weight:700;color:var(--ink)}
pre{max-height:26rem;overflow:auto}td label{cursor:pointer}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}.line.c7{stroke:var(--c7)}
.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}
.dot.c4{fill:var(--c4)}.dot.c5{fill:var(--c5)}.dot.c6{fill:var(--c6)}.dot.c7{fill:var(--c7)}
svg .end.c0{fill:var(--c0)}svg .end.c1{fill:var(--c1)}svg .end.c2{fill:var(--c2)}svg .end.c3{fill:var(--c3)}
svg .end.c4{fill:var(--c4)}svg .end.c5{fill:var(--c5)}svg .end.c6{fill:var(--c6)}svg .end.c7{fill:var(--c7)}
@media (max-width:36rem){.bar{padding:.45rem 1rem}}
@media (prefers-reduced-motion:no-preference){.changed .big{transition:color .2s}}
"""
)
MOST_PLAN = 200  # letters of a plan in the table of all runs
SKIP = '<a class="skip" href="#page">to the content</a>'


def shell(title: str, body: str, events: str = "", up: str = "", wide: bool = False) -> str:
    """Return a page of the server, whose style sheet and script are files. `events` is what it listens to."""
    listens = f' data-events="{esc(events)}"' if events else ""
    back = f'<a href="{esc(up)}">all runs</a>' if up else ""
    bar = (
        f'<div class="bar">{back}<p role="status" id="link">connecting</p>'
        '<button type="button" id="pause" aria-pressed="false">pause</button></div>'
        if events
        else f'<div class="bar">{back}</div>'
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{esc(title)}</title><link rel="stylesheet" href="/static/style.css">'
        '<link rel="icon" href="/static/icon.svg"><script src="/static/dash.js" defer></script></head>'
        f'<body{listens}>{SKIP}{bar}<main id="page"{" class=wide" if wide else ""}>{body}</main></body></html>\n'
    )


def static(title: str, body: str, made: str, wide: bool = False) -> str:
    """Return a page that is one file, without a script: the static twin."""
    policy, style = "default-src 'none'; style-src 'unsafe-inline'", " class=wide" if wide else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{esc(title)}</title><style>{STYLE}</style></head><body>{SKIP}<main id="page"{style}>{body}'
        f"<footer>{esc(made)}</footer></main></body></html>\n"
    )


def run_body(title: str, parts: Mapping[str, str]) -> str:
    """Return a run's parts in order; those that say nothing are there and hidden, so that they can appear."""
    sections = "".join(
        f'<section class="part" id="{name}" aria-label="{esc(words or name)}"{"" if parts[name] else " hidden"}>'
        f'<h2>{esc(words)}</h2><div class="body">{parts[name]}</div></section>'
        for name, (words, _) in PARTS.items()
    )
    return f'<header><div class="eyebrow">Paceline, live</div><h1>{esc(title)}</h1></header>{sections}'


def runs_table(glances: Mapping[str, Glance], now: float) -> str:
    """Return a row for each run: how it goes, against its forecast. The boxes choose what is compared."""
    rows = []
    for name, glance in sorted(glances.items(), key=lambda pair: -(pair[1].last or 0.0)):
        status = glance.status(now)
        step = "–" if glance.step is None else f"{glance.step:,}"
        of = f" of {glance.steps:,}" if glance.steps else ""
        took, promised = glance.step_seconds, glance.forecast_seconds
        against = signed_percent(took / promised - 1) if took is not None and promised else ""
        ago = "" if glance.last is None else f"{format_seconds(max(0.0, now - glance.last))} ago"
        plan = glance.plan[:MOST_PLAN]
        rows.append(
            f'<tr><td><input type="checkbox" name="run" value="{esc(name)}" aria-label="compare {esc(name)}"></td>'
            f"<td>{pill(STYLES.get(status, 'none'), status)}</td>"
            f'<td><a href="/run/{esc(quote(name, safe=""))}">{esc(name)}</a></td><td>{esc(glance.task)}</td>'
            f'<td class="n">{esc(step + of)}</td><td class="n">{esc(format_loss(glance.loss))}</td>'
            f'<td class="n">{"–" if took is None else esc(format_seconds(took))}</td><td class="n">{esc(against)}</td>'
            f'<td class="n">{esc(ago)}</td><td title="{esc(plan)}">{esc(plan)}</td></tr>'
        )
    names = ("", "status", "run", "task", "steps", "loss", "step", "against forecast", "last record", "plan")
    head = "".join(f'<th scope="col"{" class=n" if 4 <= index <= 8 else ""}>{name}</th>'
                   for index, name in enumerate(names))  # fmt: skip
    none = "" if rows else "<p>No run is here yet; one that begins appears.</p>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{none}'
    )


def runs_body(folders: Sequence[str], found: str) -> str:
    """Return the page of all runs."""
    return (
        f'<header><div class="eyebrow">Paceline, live</div><h1>Runs</h1><p class="meta">{esc(" · ".join(folders))}</p>'
        '</header><form action="/compare" method="get"><p class="tools"><input type="search" id="find"'
        ' placeholder="find a run" aria-label="find a run by its name, status, task or plan" hidden>'
        '<button>compare the chosen ones</button><a href="/bill">what they cost</a>'
        '<span id="found" role="status"></span></p>'
        f'<section class="part" id="runs" aria-label="runs"><div class="body">{found}</div></section></form>'
    )


def words_page(status: int, words: str) -> str:
    """Return a page that only says something."""
    return shell(f"{status}", f"<h1>{status}</h1><p>{esc(words)}</p>")
