"""The project's URLs and the README's links: to the repository that the checkout was
cloned from, or none.
"""

import re
from email import message_from_string
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: `origin` in a checkout's .git/config, over HTTPS or SSH: its host and its path,
#: without user, port and `.git`
ORIGIN = re.compile(
    r'^\[remote "origin"\][^[]*?^\s*url\s*=\s*'
    r"(?:https://|ssh://|(?=git@))(?:[^@/\s]*@)?([\w.-]+)(?::\d+(?=/))?[:/]([\w./-]+?)(?:\.git)?/?\s*$",
    re.MULTILINE,
)
#: code, which is not changed; or a link or a picture: its beginning, and the
#: repository's file that it names
LINK = re.compile(
    r'(^```.*?^```|`[^`\n]*`)|(\]\(|\b(?:href|src|srcset)=")(?![a-z+]+:|[#/])([^)"\s]+)',
    re.MULTILINE | re.DOTALL,
)
PICTURES = (".png", ".svg")


class UrlsMetadataHook(MetadataHookInterface):
    """Fills `urls` and `readme` of the metadata; a source distribution has the URLs
    that it was built with.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `urls` and `readme`."""
        metadata["urls"] = urls(Path(self.root))
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = described(text, metadata["urls"].get("Source", ""), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def described(readme: str, source: str, version: str) -> str:
    """README for a package index: its relative links lead to this version's tag, if the
    source is on GitHub.
    """
    if not source.startswith("https://github.com/"):
        return readme

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if (found[3] or "").endswith(PICTURES) else "blob"
        return found[1] or f"{found[2]}{source}/{kind}/v{version}/{found[3]}"

    return LINK.sub(absolute, readme)


def urls(root: Path) -> dict[str, str]:
    """The URLs by label, from `PKG-INFO` of a source distribution or from `origin` of a
    checkout.
    """
    if (made := root / "PKG-INFO").is_file():
        lines = message_from_string(made.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    config = root / ".git" / "config"
    found = ORIGIN.search(config.read_text(encoding="utf-8")) if config.is_file() else None
    if found is None:
        return {}
    source = f"https://{found[1]}/{found[2]}"
    if found[1] != "github.com":  # other hosts have other paths for these pages
        return {"Source": source}
    return {
        "Source": source,
        "Documentation": f"{source}/tree/main/docs",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }
