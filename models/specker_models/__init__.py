"""The bundled checkpoints of specker: a small family of code models and drafts for SmolLM2-135M-Instruct. Data only."""

from pathlib import Path

__version__ = "0.2.0"
FOLDER = Path(__file__).parent


def path(name: str) -> Path:
    """A checkpoint's folder or a file, e.g. "code-target". Raises ValueError if there is none of this name."""
    found = FOLDER / name
    if not name or name.startswith("_") or Path(name).name != name or not found.exists():
        raise ValueError(f"specker_models has no {name!r}")
    return found
