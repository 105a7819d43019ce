"""The distributions: one version everywhere, and light imports."""

import re
from pathlib import Path

import specker_models
import yaml

import specker

ROOT = Path(__file__).parents[1]


def test_one_version_everywhere():
    """Of the package, the models, the citation and the newest entry of the changelog; with one date."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entries = re.findall(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert specker.__version__ == specker_models.__version__ == citation["version"] == entries[0][0]
    assert citation["date-released"] == entries[0][1]
    assert [date for _, date in entries] == sorted((date for _, date in entries), reverse=True)
    required = {"cff-version", "message", "title", "authors"}  # of schema 1.2.0
    assert required <= citation.keys() and citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
