"""The report's style sheet: system fonts, light and dark, narrow screens and paper."""

CSS = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f6f7f9;--ink:#171a1f;--soft:#58616c;--line:#dde1e7;--grid:#e9ecf0;
--train:#2360c5;--held:#c4500c;--ref:#737b86;--band:rgba(26,127,75,.13);--expected:#1a7f4b;
--good:#176b40;--good-bg:#e5f4ec;--warn:#8a5300;--warn-bg:#fcf0da;--bad:#a8201a;--bad-bg:#fdebea;
--none:#58616c;--none-bg:#eef0f3;
--c0:#2360c5;--c1:#12937f;--c2:#e0932b;--c3:#8457d8;--c4:#cf5388;--c5:#7f9a26;--c6:#7b8794;--c7:#a9673a}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--panel:#1c2026;--ink:#e7eaee;--soft:#a0a9b4;--line:#323840;
--grid:#272c33;--train:#74a5f7;--held:#f39a55;--ref:#8b94a0;--band:rgba(87,196,138,.16);--expected:#57c48a;
--good:#7ed9a6;--good-bg:#173526;--warn:#f2bd68;--warn-bg:#3a2c12;--bad:#ff9b93;--bad-bg:#421d1b;
--none:#a0a9b4;--none-bg:#272c33;
--c0:#6c9df0;--c1:#3fb8a3;--c2:#e7a84e;--c3:#a98bea;--c4:#e07ea8;--c5:#a3bb52;--c6:#8d97a4;--c7:#c98c61}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);overflow-wrap:anywhere;
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.5rem 4rem}
header{margin-bottom:1.75rem}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.02em;margin:.35rem 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;letter-spacing:-.01em;margin:2.75rem 0 .6rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:.95rem;margin:1.5rem 0 .3rem}
p{margin:.4rem 0;max-width:44rem}
.eyebrow,.meta,.note,figcaption{color:var(--soft);font-size:.86rem}
.eyebrow{letter-spacing:.04em}
.verdict{font-size:1.15rem;line-height:1.5;max-width:46rem;margin:0}
.pill{display:inline-block;padding:.08rem .6rem;border-radius:1rem;font-size:.8rem;font-weight:600;white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}.warn{color:var(--warn);background:var(--warn-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}.none{color:var(--none);background:var(--none-bg)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.2rem,1fr));gap:.7rem;margin:1.4rem 0 .6rem}
.card{border:1px solid var(--line);border-radius:.6rem;padding:.75rem .85rem;background:var(--panel)}
.card .top{color:var(--soft);font-size:.86rem}
.card .big{font-size:1.45rem;font-weight:600;letter-spacing:-.015em;line-height:1.3;margin:.25rem 0 .1rem}
td .pill{white-space:normal}
.card .pill{margin:.1rem 0 .35rem}
.card .small{color:var(--soft);font-size:.82rem;line-height:1.4}
.alert{border-left:4px solid var(--bad);background:var(--bad-bg);border-radius:.3rem;padding:.8rem 1rem;margin:1.2rem 0}
.alert b{color:var(--bad)}.alert dl{margin:.4rem 0 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.1rem;margin:.6rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
table{overflow-wrap:normal}td:first-child,th:first-child{overflow-wrap:anywhere;min-width:9rem}th:first-child{white-space:normal}
figure{margin:.8rem 0 1.2rem}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.89rem;margin:.6rem 0}
th,td{text-align:left;padding:.38rem .8rem .38rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft);font-size:.82rem;white-space:nowrap}
figcaption{margin-top:.5rem}
td.n+td:not(.n),th.n+th:not(.n){padding-left:.6rem}
td.n,th.n{text-align:right;white-space:nowrap}
tr.group td{font-weight:600;border-bottom-color:var(--line);padding-top:.6rem}
td .note{font-weight:400}
tr.term td{color:var(--soft);font-size:.84rem}tr.term td:first-child{padding-left:1rem}
tr.total td{font-weight:650;border-top:2px solid var(--line)}
.tag{font-size:.76rem;border:1px solid var(--line);border-radius:.3rem;padding:0 .35rem;color:var(--soft);
white-space:nowrap;font-weight:400}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.3rem;margin:.3rem 0 0;padding:0;font-size:.86rem}
.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:.2rem;margin-right:.45rem}
.legend span{color:var(--soft)}
pre{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:.8rem 1rem;overflow-x:auto;
font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
summary{cursor:pointer;color:var(--soft);margin:.6rem 0}
svg.chart{display:block;width:100%;min-width:34rem;height:auto;font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
svg.interval{display:block;width:100%;max-width:16rem;height:auto;margin:.45rem 0 .3rem}
svg text{fill:var(--soft)}svg .label{fill:var(--soft)}svg .end{fill:var(--ink);font-weight:600}
svg .end.train{fill:var(--train)}svg .end.held{fill:var(--held)}svg .end.ref{fill:var(--ref)}
.grid{stroke:var(--grid)}.axis{stroke:var(--ref)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.line.train{stroke:var(--train)}.line.held{stroke:var(--held)}.line.dim{stroke:var(--ref)}
.line.faint{stroke:var(--train);stroke-width:1;opacity:.35}
.dot.train,.dot.faint{fill:var(--train)}.dot.held{fill:var(--held)}.dot.dim{fill:var(--ref)}
.line.dashed{stroke-dasharray:7 3}.line.dotted{stroke-dasharray:2 3}
.reference{stroke:var(--ref);stroke-dasharray:2 4;stroke-width:1.4}
.expected{stroke:var(--expected);stroke-dasharray:5 4;stroke-width:1.4}
.expected.solid{stroke-dasharray:none;stroke-width:2}
.band{fill:var(--band)}.range{fill:var(--band);stroke:var(--expected);stroke-width:.8}
.measured{fill:var(--ink);stroke:var(--panel);stroke-width:1.5}
.marker{stroke:var(--held);stroke-dasharray:1 3;stroke-width:1.4}.beyond{fill:var(--train)}
.tip{fill:var(--ink);opacity:0}.tip:hover{opacity:.07}
.fill.c0,i.c0{fill:var(--c0);background:var(--c0)}.fill.c1,i.c1{fill:var(--c1);background:var(--c1)}
.fill.c2,i.c2{fill:var(--c2);background:var(--c2)}.fill.c3,i.c3{fill:var(--c3);background:var(--c3)}
.fill.c4,i.c4{fill:var(--c4);background:var(--c4)}.fill.c5,i.c5{fill:var(--c5);background:var(--c5)}
.fill.c6,i.c6{fill:var(--c6);background:var(--c6)}.fill.c7,i.c7{fill:var(--c7);background:var(--c7)}
footer{margin-top:3rem;color:var(--soft);font-size:.82rem}
@media (max-width:36rem){main{padding:1.25rem 1rem 3rem}h1{font-size:1.5rem}dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:.4rem}.verdict{font-size:1.05rem}
svg.chart{min-width:0;overflow:visible;font-size:15px}.scroll:has(svg.chart){overflow:visible}}
@media print{:root{color-scheme:light;--bg:#fff;--panel:#fff;--ink:#000;--soft:#444;--line:#bbb;--grid:#ddd;
--train:#2360c5;--held:#c4500c;--ref:#666;--band:rgba(26,127,75,.13);--expected:#1a7f4b;
--good:#176b40;--good-bg:#fff;--warn:#8a5300;--warn-bg:#fff;--bad:#a8201a;--bad-bg:#fff;--none:#444;--none-bg:#fff}
body{font-size:10.5pt}main{max-width:none;padding:0}figure,.card,tr,.alert{break-inside:avoid}h2,h3{break-after:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}pre{white-space:pre-wrap}svg.chart{min-width:0}}
"""
