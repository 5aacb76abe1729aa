"""What a package index shows of the README: its links lead to files of the repository, which are not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
#: A picture or a link whose target is neither an address nor a place on the page.
_RELATIVE = re.compile(r"(?P<kind>!?\[(?P<text>[^\]]*)\])\((?!\w+:|#)(?P<target>[^)\s]+)\)")


def outside_a_checkout(readme: str, address: str) -> str:
    """The README where there are no files beside it.

    Args:
        readme: text in Markdown.
        address: address under which the files of the repository lie; empty if there is none.

    Returns:
        The text, with links to that address; without one, links and pictures are their plain text.
    """
    base = address.rstrip("/")
    shown = rf"\g<kind>({base}/\g<target>)" if base else r"\g<text>"
    # Every second part is a block of code.
    return "".join(
        part if number % 2 else _RELATIVE.sub(shown, part) for number, part in enumerate(_FENCE.split(readme))
    )


class ReadmeHook(MetadataHookInterface):
    """Gives the wheel its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add ``readme``, which ``pyproject.toml`` declares as dynamic."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = outside_a_checkout(readme, self.config["address"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
