"""The picture of the papers: how many times as fast as `ar` each setting is, a panel for each paper."""

from typing import Any

Row = dict[str, Any]

COLORS = {0.0: "#0969da", 0.7: "#9ec5f4"}


def draw(rows: list[Row]) -> Any:
    """Bars with the spread over texts: the newest of each setting of the first model."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["table"] == "speed" and row["model"] == rows[0]["model"] and row["way"] != "ar"]
    papers: dict[str, dict[str, list[Row]]] = {}
    for row in {(row["paper"], row["way"], row["temperature"]): row for row in rows}.values():
        papers.setdefault(row["paper"], {}).setdefault(row["way"], []).append(row)
    counts = [len(ways) for ways in papers.values()]
    figure = Figure(figsize=(9, 1.2 + 0.36 * sum(counts)), layout="constrained")
    figure.suptitle(rows[0]["model"], fontsize=10)
    axes = figure.subplots(len(papers), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for axis, (paper, ways) in zip(axes, papers.items(), strict=True):
        for place, each in enumerate(ways.values()):
            for n, row in enumerate(each):
                spread, speed = row["over_ar_texts"], row["over_ar"]
                least, most = min(speed, spread["p20"]), max(speed, spread["p80"])
                at, errors = place + 0.36 * (n - (len(each) - 1) / 2), [[speed - least], [most - speed]]
                color = COLORS.get(row["temperature"], "#afb8c1")
                axis.barh(at, speed, height=0.34, color=color, xerr=errors, ecolor="#57606a", capsize=2)
        axis.set_yticks(range(len(ways)), ways, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_title(paper, fontsize=9, loc="left")
    axes[-1].set_xlabel("times as fast as ar: T = 0 (dark) and 0.7 (light); lines: p20 to p80 over texts", fontsize=8)
    return figure
