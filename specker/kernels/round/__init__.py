"""The ops that only a round needs: where its rows stand, and what the host would otherwise do between launches."""
