"""Draw the pictures of programs on pages: `python docs/page_pictures.py` runs these programs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images" / "pages"
sys.path.insert(0, str(ROOT / "tests"))

import shown_programs  # noqa: E402 - found through the line above


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for program, picture in shown_programs.pictures_of(page.read_text(encoding="utf-8"), page.name):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / program.name
                path.write_text(program.text, encoding="utf-8")
                launch = [
                    sys.executable,
                    str(ROOT / "tests" / "launch.py"),
                    "--ranks",
                    str(program.ranks),
                    "--limit",
                    "120",
                ]
                subprocess.run([*launch, "--", str(path)], cwd=folder, check=True)
                (FOLDER / picture).write_bytes((Path(folder) / picture).read_bytes())


if __name__ == "__main__":
    main()
