"""The rounds of one or several runs as one HTML page that needs no server: `specker view trace.jsonl`.

`read.py` reads and checks traces (trace.py documents the format), `page.py` makes the page. Its scripts and
style are text.js, charts.js, page.js, page.css and, for the charts, uPlot 1.6.32 (MIT, uplot.LICENSE). The page holds
them all. `live.py` and live.js make it the page of a running server, which grows.
"""
