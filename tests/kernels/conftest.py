"""What launchers of kernels start."""

from typing import Any

import pytest

from specker.kernels.variant import Variant

Launches = list[tuple[str, tuple[int, ...]]]


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """(name, grid) of every launch, none of which runs: fake tensors have no values to read."""
    noted: Launches = []
    monkeypatch.setattr(Variant, "__call__", lambda self, grid, *_: noted.append((self.kernel.__name__, grid)))
    return noted


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """(name, grid) of every launch."""
    noted: Launches = []
    launch = Variant.__call__

    def call(self: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        noted.append((self.kernel.__name__, grid))
        launch(self, grid, *arguments)

    monkeypatch.setattr(Variant, "__call__", call)
    return noted
