"""What mkdocs is told besides mkdocs.yml: which pages the site has, and where their links lead.

The documents are written to be read in the repository. So three of them are in its root, links
lead to sources, and remarks for tests stand above blocks of code. On the site the three are pages,
the sources lie below ``source/``, and the remarks are left out.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]

PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipes/README.md": "recipes.md",
}
"""Documents outside of docs/, and what they are on the site."""

LINK: Final = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
REMARK: Final = re.compile(r"^[ ]*<!-- (?:not run|before|run):.*?-->\n", re.MULTILINE | re.DOTALL)
TITLE: Final = re.compile(r"^# (.*)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of adapters and the decisions in the navigation."""
    names = [path.parent.name for path in sorted(ROOT.glob("portus_*/__init__.py"))]
    pages = {name: f"{name.removeprefix('portus_')}.md" for name in names}
    _section(config.nav, "How to")[:0] = [
        {_title(ROOT / "docs" / page): page} for page in pages.values()
    ]
    _section(config.nav, "Reference").extend(
        {name: f"reference/{page}"} for name, page in pages.items()
    )
    found = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    _section(config.nav, "Decisions").extend(
        {_title(path): f"decisions/{path.name}"} for path in found
    )
    return config


def _title(page: Path) -> str:
    title = TITLE.search(page.read_text())
    assert title is not None, f"{page}: a page begins with its title"
    return title[1]


def _section(nav: Any, name: str) -> list[dict[str, str]]:
    """The list of that name, at any depth of the navigation."""
    for item in nav:
        for title, below in item.items() if isinstance(item, dict) else ():
            if title == name:
                found: list[dict[str, str]] = below
                return found
            if isinstance(below, list) and (inner := _section(below, name)) is not None:
                return inner
    return None  # type: ignore[return-value]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of the root, and every source that a page leads to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for page in list(files.documentation_pages()):
        for target, _ in LINK.findall(page.content_string):
            for file in _sources(_target(_in_repository(page), target), config):
                if files.get_file_from_path(file.src_uri) is None:
                    files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site; without the remarks for tests."""
    if page.file.abs_src_path is None:  # a list of sources
        return markdown
    source, here = _in_repository(page.file), posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        path, anchor = _target(source, found[1]), found[2] or ""
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        else:
            place = f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}"
        return f"]({posixpath.relpath(place, here or '.')}{anchor})"

    return LINK.sub(link, REMARK.sub("", markdown))


def _in_repository(file: File) -> str:
    """The path of a page's source, from the root of the repository."""
    assert file.abs_src_path is not None
    return os.path.relpath(file.abs_src_path, ROOT)


def _target(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _sources(path: str, config: MkDocsConfig) -> Iterator[File]:
    """The file at this path of the repository; of a folder, its files and a list of them."""
    if path in PAGES or path.startswith("docs/") or not (ROOT / path).exists():
        return  # a link that leads nowhere is told by mkdocs
    inner = sorted(each for each in (ROOT / path).glob("*") if each.is_file())
    if (ROOT / path).is_dir():
        listed = "\n".join(f"- [{each.name}]({each.name})" for each in inner)
        yield File.generated(config, f"source/{path}/index.md", content=f"# {path}\n\n{listed}\n")
    for each in inner or [ROOT / path]:
        place = f"source/{each.relative_to(ROOT).as_posix()}"
        yield File.generated(config, place, abs_src_path=str(each))
