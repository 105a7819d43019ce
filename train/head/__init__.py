"""Train an EAGLE-3 head (arXiv 2503.01840) for a target on a machine with a few cores: `python -m train.head`."""
