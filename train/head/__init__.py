"""Train heads that read a target's hidden states on a machine with a few cores, with `python -m train.head`: EAGLE-3
(arXiv 2503.01840) and DFlash (arXiv 2602.06036)."""
