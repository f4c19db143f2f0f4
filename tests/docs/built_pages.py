"""Check the built pages: that each link between them leads somewhere, and that searches find the right page first.

    python tests/docs/built_pages.py docs/_build/html

Ranks pages as Sphinx's search does in the browser (searchtools.js): a word in a heading counts more than one in the
text, the name of something public as much, and parts of words count where there is no whole one. Exits with 1 where
another page comes first, or a link's page or anchor isn't there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

from sphinx.search.en import SearchEnglish

# What people search for, and the pages that may come first.
EXPECTED = {
    "install": ["start/installation"],
    "conda": ["start/installation"],
    "tutorial": ["start/tutorial"],
    "slurm": ["howto/slurm_pbs"],
    "srun": ["howto/slurm_pbs"],
    "PBS": ["howto/slurm_pbs"],
    "notebook": ["howto/notebooks"],
    "Jupyter": ["howto/notebooks"],
    "ipyparallel": ["howto/notebooks"],
    "HDF5": ["howto/fields"],
    "profile": ["howto/profiling", "diagnosis"],
    "strong scaling": ["howto/profiling"],
    "restart": ["howto/restarts"],
    "deadlock": ["howto/hangs", "faults"],
    "mismatch": ["howto/hangs", "faults"],
    "domain decomposition": ["domains"],
    "halo exchange": ["domains"],
    "checkpointing": ["timestepping"],
    "matrix-free": ["linalg"],
    "multigrid": ["multigrid", "reference/linalg"],
    "stiff": ["ensembles"],
    "SciML": ["ensembles"],
    "steady state": ["ensemble_gradients", "reference/ensemble"],
    "PDE": ["start/pde_tutorial", "multigrid", "howto/grid_inversion", "start/tutorial"],
    "boundary condition": ["start/pde_tutorial"],
    "regularization": ["inverse_problems", "howto/grid_inversion"],
    "coefficient identification": ["howto/grid_inversion", "gallery/poisson_inverse"],
    "source identification": ["gallery/burgers_control"],
    "initial-condition inversion": ["gallery/heat_source"],
    "data assimilation": ["gallery/shallow_water"],
    "full-waveform inversion": ["gallery/seismic_inversion", "gallery/seismic_3d"],
    "fault tolerance": ["recovery"],
    "mpi4jax": ["comparison"],
    "Firedrake": ["comparison"],
    "Devito": ["comparison"],
    "glossary": ["reference/glossary"],
    "environment variables": ["environment"],
    "cite": ["project/cite"],
    "BibTeX": ["project/cite"],
    "FAQ": ["start/faq"],
    "troubleshooting": ["start/faq"],
    "mpirun": ["start/faq"],
    "Windows": ["start/faq"],
    "cheat sheet": ["start/cheat_sheet"],
    "user guide": ["guide"],
    "gallery": ["gallery/index"],
    "performance": ["performance"],
    "diffrax": ["comparison"],
    "PETSc": ["comparison", "reference/linalg"],
}
TITLE, TITLE_WORD, PART_OF_TITLE_WORD, WORD, PART_OF_WORD = 15, 15, 7, 5, 2
ENTRY, NAME, PART_OF_NAME, PRIORITY = 100, 11, 6, {0: 15, 1: 5, 2: -5}


class Index:
    """The search index of built pages."""

    def __init__(self, pages: Path) -> None:
        text = (pages / "searchindex.js").read_text(encoding="utf-8")
        self.data = json.loads(text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
        self.language = SearchEnglish({})

    def first(self, query: str) -> str:
        """Return the page that a search shows first, or an empty string."""
        scores: dict[int, float] = defaultdict(float)
        for found in (self._titles(query), self._entries(query), self._names(query), self._words(query)):
            for file, score in found.items():
                scores[file] = max(scores[file], score)
        names, titles = self.data["docnames"], self.data["titles"]
        best = sorted(scores, key=lambda file: (-scores[file], titles[file].lower()))
        return names[best[0]] if best else ""

    def _titles(self, query: str) -> dict[int, float]:
        score: dict[int, float] = defaultdict(float)
        for title, places in self.data["alltitles"].items():
            if query.lower() in title.lower() and len(query) >= len(title) / 2:
                for file, _ in places:
                    own = self.data["titles"][file] == title
                    score[file] = max(score[file], round(TITLE * len(query) / len(title)) + own)
        return score

    def _entries(self, query: str) -> dict[int, float]:
        score: dict[int, float] = defaultdict(float)
        for entry, places in self.data["indexentries"].items():
            if query.lower() in entry and len(query) >= len(entry) / 2:
                for file, _, main in places:
                    if main:  # the others stand behind all
                        score[file] = max(score[file], round(ENTRY * len(query) / len(entry)))
        return score

    def _names(self, query: str) -> dict[int, float]:
        score: dict[int, float] = defaultdict(float)
        terms = query.lower().split()
        for prefix, objects in self.data["objects"].items():
            for file, kind, priority, _, name in objects:
                described = f"{prefix} {name} {self.data['objnames'][str(kind)][2]} {self.data['titles'][file]}".lower()
                last = name.lower().split(".")[-1]
                for term in terms:
                    if term in f"{prefix}.{name}".lower() and all(other in described for other in terms):
                        points = NAME if term == last else PART_OF_NAME if term in last else 0
                        score[file] = max(score[file], points + PRIORITY.get(priority, 0))
        return score

    def _words(self, query: str) -> dict[int, float]:
        words = [self.language.stem(word) for word in query.lower().replace("-", " ").split()]
        found = [self._files_with(word) for word in words if word not in self.language.stopwords]
        common = set.intersection(*map(set, found)) if found else set()
        return {file: max(each[file] for each in found) for file in common}

    def _files_with(self, word: str) -> dict[int, float]:
        files: dict[int, float] = defaultdict(float)
        for terms, whole, part in (("terms", WORD, PART_OF_WORD), ("titleterms", TITLE_WORD, PART_OF_TITLE_WORD)):
            known = self.data[terms]
            hits = {word: whole} if word in known else {term: part for term in known if len(word) > 2 and word in term}
            for term, score in hits.items():
                places = known[term]
                for file in places if isinstance(places, list) else [places]:
                    files[file] = max(files[file], score)
        return files


def links_to_nowhere(pages: Path) -> list[str]:
    """Return the links between pages, and to their pictures, whose file or anchor isn't there."""
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in pages.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    nowhere = []
    for page, text in texts.items():
        if "_modules" in page.parts:  # listings of the sources: viewcode's links back miss what is documented elsewhere
            continue
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = unquote(link.replace("&amp;", "&")).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                nowhere.append(f"{page.relative_to(pages.resolve())}: {link}")
    return sorted(nowhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", type=Path, help="the folder of the built pages")
    pages = parser.parse_args().pages
    if nowhere := links_to_nowhere(pages):
        raise SystemExit("links to what isn't there:\n" + "\n".join(nowhere))
    index = Index(pages)
    first = {query: index.first(query) for query in EXPECTED}
    wrong = {query: right for query, right in EXPECTED.items() if first[query] not in right}
    if wrong:
        found = (f"{query!r}: {first[query] or 'nothing'} in the place of {' or '.join(wrong[query])}" for query in wrong)
        raise SystemExit("searches that don't find the right page first:\n" + "\n".join(found))
    print(f"{len(EXPECTED)} searches find the right page first")


if __name__ == "__main__":
    main()
