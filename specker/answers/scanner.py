"""The search for markers in a text that grows: stop strings, the tags of thoughts, the beginnings of tool calls."""

from collections.abc import Iterable


class Scanner:
    """Finds the first of several markers in a text that grows. Text that could be the beginning of one is held back.

    Attributes:
        found: the marker, once one is complete: the longest if several end there. Then all is held, from it on.
        held: the end of the text so far.
    """

    def __init__(self, markers: Iterable[str], trims: bool = False):
        """`trims`: white space before a marker belongs to it, so it is held back, too."""
        self._markers, self._trims = [Marker(text) for text in markers], trims
        self.held = self.found = ""

    def add(self, new: str) -> str:
        """More of the text -> the part that certainly stands before the first marker."""
        start, self.held = len(self.held), self.held + new
        if self.found:
            return ""
        end = len(self.held)
        for n, character in enumerate(new if self._markers else "", start + 1):
            if size := max(marker.length if marker.ends(character) else 0 for marker in self._markers):
                end = n - size
                self.found = self.held[end:n]
                break
        else:
            end -= max((marker.begun for marker in self._markers), default=0)
        if self._trims:
            end = len(self.held[:end].rstrip())
        before, self.held = self.held[:end], self.held[end:]
        return before

    @property
    def marked(self) -> str:
        """What is held without white space before it, so that the marker that was found is its beginning."""
        return self.held.lstrip()

    def flush(self) -> str:
        """What is held. The search begins anew behind it."""
        rest, self.held, self.found = self.held, "", ""
        for marker in self._markers:
            marker.begun = 0
        return rest


class Marker:
    """Finds a string in a text that grows by single characters, each in constant time on average: Knuth, Morris and
    Pratt, https://doi.org/10.1137/0206024."""

    def __init__(self, text: str):
        self.text, self.length = text, len(text)
        self.begun = 0  # characters of the string that the end of the text has
        self._falls = [0, 0]  # after how many characters -> of how many a proper end is also the string's beginning
        for n in range(1, self.length):
            self._falls.append(self._after(text[n], self._falls[n]))

    def ends(self, character: str) -> bool:
        """Whether the next character completes the string, after which none may follow."""
        self.begun = self._after(character, self.begun)
        return self.begun == self.length

    def _after(self, character: str, begun: int) -> int:
        while begun and self.text[begun] != character:
            begun = self._falls[begun]
        return begun + (self.text[begun] == character)
