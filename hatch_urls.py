"""The project's URLs: those of the repository that the checkout came from, and none where that is not known."""

import re
from email import message_from_string
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: `origin` of a checkout, over HTTPS or SSH: the host and the path, without a user, a port and `.git`
ORIGIN = re.compile(
    r'^\[remote "origin"\][^[]*?^\s*url\s*=\s*'
    r"(?:https://|ssh://|(?=git@))(?:[^@/\s]*@)?([\w.-]+)(?::\d+(?=/))?[:/]([\w./-]+?)(?:\.git)?/?\s*$",
    re.MULTILINE,
)


class UrlsMetadataHook(MetadataHookInterface):
    """Fills `urls` of the metadata: a source distribution keeps those that it was made with."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set them."""
        metadata["urls"] = urls(Path(self.root))


def urls(root: Path) -> dict[str, str]:
    """By label, from `PKG-INFO` of a source distribution or from `origin` of a checkout."""
    if (made := root / "PKG-INFO").is_file():
        lines = message_from_string(made.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    config = root / ".git" / "config"
    found = ORIGIN.search(config.read_text(encoding="utf-8")) if config.is_file() else None
    if found is None:
        return {}
    source = f"https://{found[1]}/{found[2]}"
    if found[1] != "github.com":  # others name these pages otherwise
        return {"Source": source}
    return {
        "Source": source,
        "Documentation": f"{source}/tree/main/docs",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }
