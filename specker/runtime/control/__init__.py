"""How much to draft: policies propose, measured costs decide."""
