"""What a user should know about an engine: sentences by their keys in `--json`."""


class Notes(dict[str, str]):
    """Remarks on an engine that is being made. A fact asks nothing of its reader, so it is neither printed nor logged
    as a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: set[str] = set()  # keys

    def fact(self, name: str, sentence: str) -> None:
        self[name] = sentence
        self.facts.add(name)

    def warnings(self) -> dict[str, str]:
        """The remarks that are no facts."""
        return {name: sentence for name, sentence in self.items() if name not in self.facts}
