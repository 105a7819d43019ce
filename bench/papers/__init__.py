"""The papers of the strategies, each in its own regime: `make papers`.

Models of a millisecond a step show the host's work, not a paper's idea. So the bundled family gets the shape of a real
model (specker/zoo/inflate.py), with int8 weights on a CPU, and each paper's settings take turns with `ar` at every
prompt. Tokens are those of `ar` in every row, or the run ends.

Speeds are whole requests, prefill included. The spread of a speed is that of the single texts: p20 and p80 of the
ratios of an `ar` and the setting that decoded the same text in the same round.

`--save` appends rows to bench/results/<machine>/papers.jsonl and draws papers.svg beside them; `make pages` makes the
tables of docs/papers.md of the newest rows. `--target` with `--questions` takes another model than the bundled family,
such as a LayerSkip checkpoint for `--papers del`.
"""
