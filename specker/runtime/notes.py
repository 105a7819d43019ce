"""What a user should know about an engine: sentences by their keys in `--json`."""


class Notes(dict[str, str]):
    """Remarks on an engine that is being made. A fact asks nothing of its reader, so it is not a warning. A run prints
    those facts that tell its reader what drafts, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: set[str] = set()  # keys
        self.shown: list[str] = []  # keys of those facts that a run prints

    def fact(self, name: str, sentence: str, shown: bool = False) -> None:
        self[name] = sentence
        self.facts.add(name)
        self.shown += [name] if shown else []

    def warnings(self) -> dict[str, str]:
        """The remarks that are no facts."""
        return {name: sentence for name, sentence in self.items() if name not in self.facts}
