"""Ops that only a round needs: they place its rows and do the host's work between launches."""
