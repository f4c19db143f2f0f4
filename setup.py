"""What a package index shows of the README. Everything else about the package stands in setup.cfg.

README.md links to files of this repository by their paths, which an index doesn't have. Where setup.cfg names the
repository's address (`project_urls`, `Source`), they become links to there; else links become their text, and pictures go.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]*)\)")


def source_address() -> str:
    """Return the address under which the repository's files are found, or an empty string."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    addresses = settings.get("metadata", "project_urls", fallback="").splitlines()
    named = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in addresses if "=" in line)
    return named.get("Source", "").rstrip("/")


def long_description(address: str) -> str:
    """Return README.md with its links to files as an index can follow them."""

    def absolute(link: re.Match) -> str:
        picture, text, path = link.groups()
        if not address:
            return "" if picture else text
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(source_address()), long_description_content_type="text/markdown")
