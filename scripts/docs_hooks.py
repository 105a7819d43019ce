"""Hooks of `make docs`: pages that live outside docs/ join the site, and links that leave it are kept honest.

README.md becomes the start page. A link from a page to a file of the repository that is not in the site becomes the
file's path as code, since a site does not know where the repository is.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
JOINING = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "bench/LOG.md": "log.md",
    "bench/results/static.md": "static.md",
    "bench/results/static_amd.md": "static_amd.md",
    "examples/adr/README.md": "adr-example.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in JOINING.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    here = home_of(page.file.src_uri)
    pages = {file.src_uri for file in files}
    return LINK.sub(lambda m: relinked(m, here, page.file.src_uri, pages), markdown)


def home_of(uri: str) -> str:
    """Where a page lies in the repository."""
    return {page: source for source, page in JOINING.items()}.get(uri, f"docs/{uri}")


def relinked(link: re.Match[str], here: str, uri: str, pages: set[str]) -> str:
    """The link as the site needs it. Raises FileNotFoundError if the repository lacks its file."""
    bang, text, path, anchor = link.groups(default="")
    target = (ROOT / here).parent.joinpath(path).resolve()
    inside = target.relative_to(ROOT).as_posix()
    if not target.exists():
        raise FileNotFoundError(f"{here}: {path}")
    if target.is_dir() and (target / "README.md").exists():
        inside += "/README.md"
    page = JOINING.get(inside, inside.removeprefix("docs/"))
    if page in pages and (inside in JOINING or inside.startswith("docs/")):
        up = "../" * (len(PurePosixPath(uri).parts) - 1)
        return f"{bang}[{text}]({up}{page}{anchor})"
    return f"{text} (`{inside}`)" if inside not in text else text
