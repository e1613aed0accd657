"""Fill in the project's URLs and the README's links.

They lead to the repository that the checkout was cloned from::

    checkout     origin of .git/config  ->  Source, Documentation, ...
    sdist        Project-URL of PKG-INFO, written when it was built
    neither      no URLs, and a README as it is
"""

import re
from email import message_from_string
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# `origin` in a checkout's .git/config, over HTTPS or SSH: its host and its path,
# without user, port and `.git`.
ORIGIN = re.compile(
    r'^\[remote "origin"\][^[]*?^\s*url\s*=\s*'
    r"(?:https://|ssh://|(?=git@))(?:[^@/\s]*@)?"
    r"(?P<host>[\w.-]+)(?::\d+(?=/))?[:/](?P<path>[\w./-]+?)(?:\.git)?/?\s*$",
    re.MULTILINE,
)
# Code, which is not changed; or a link or a picture: its beginning, and the
# repository's file that it names.
LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]*`)"
    r'|(?P<beginning>\]\(|\b(?:href|src|srcset)=")(?![a-z+]+:|[#/])(?P<file>[^)"\s]+)',
    re.MULTILINE | re.DOTALL,
)
PICTURES = (".png", ".svg")


class UrlsMetadataHook(MetadataHookInterface):
    """The hook that fills `urls` and `readme` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `urls` and `readme`."""
        metadata["urls"] = urls(Path(self.root))
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata["urls"].get("Source", "")
        text = described(readme, source, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def described(readme: str, source: str, version: str) -> str:
    """Return the README for a package index.

    Its relative links lead to this version's tag, if the source is on GitHub.
    """
    if not source.startswith("https://github.com/"):
        return readme

    def absolute(match: re.Match[str]) -> str:
        if match["code"]:
            return match["code"]
        kind = "raw" if match["file"].endswith(PICTURES) else "blob"
        return f"{match['beginning']}{source}/{kind}/v{version}/{match['file']}"

    return LINK.sub(absolute, readme)


def urls(root: Path) -> dict[str, str]:
    """Return the URLs by label, or none if it is unknown where the code is."""
    package_info = root / "PKG-INFO"
    if package_info.is_file():
        message = message_from_string(package_info.read_text(encoding="utf-8"))
        lines = message.get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    config = root / ".git" / "config"
    origin = ORIGIN.search(config.read_text(encoding="utf-8")) if config.is_file() else None
    if origin is None:
        return {}
    source = f"https://{origin['host']}/{origin['path']}"
    if origin["host"] != "github.com":
        # Other hosts have other paths for these pages.
        return {"Source": source}
    return {
        "Source": source,
        "Documentation": f"{source}/tree/main/docs",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }
