"""Write a software bill of materials: the packages of the lock file, in CycloneDX's JSON.

    python3 .ci/sbom.py dist/mpiad-0.1.0.cdx.json

A component has the hashes of all of its distributions that pip accepts, and its scope is `required` if mpiad doesn't run
without it, else `optional`: for an extra, for tests or for the documentation. The time isn't recorded, so that one lock
file has one bill.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
from pathlib import Path

import environment


def components(text: str) -> list[tuple[dict, set[str]]]:
    """Return the packages of a lock file as components, each with the names of the packages that need it."""
    found = []
    for entry in re.split(r"\n(?=\S)", text):
        if not (pin := re.match(r"([\w.-]+)==([\w.!+-]+)(?: ; ([^\\]+))?", entry)):
            continue
        name, version, marker = pin.groups()
        component = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": content} for content in re.findall(r"sha256:([0-9a-f]{64})", entry)],
        }
        if marker:
            component["properties"] = [{"name": "environment marker", "value": marker.strip()}]
        found.append((component, set(re.findall(r"# +(?:via )?([\w.-]+)", entry))))
    return found


def bill() -> dict:
    """Return the bill of materials of the lock file."""
    setup = configparser.ConfigParser()
    setup.read(environment.SETUP)
    metadata = setup["metadata"]
    root = f"pkg:pypi/mpiad@{metadata['version']}"
    parts = components(environment.LOCK.read_text())
    required = environment.locked(set(environment.requirements([])))
    needed = {component["name"] for component, _ in components(required)}
    references: dict[str, list[str]] = {}  # a name may have several versions, by the environment
    for component, _ in parts:
        component["scope"] = "required" if component["name"] in needed else "optional"
        references.setdefault(component["name"], []).append(component["bom-ref"])
    depends: dict[str, set[str]] = {root: set(), **{component["bom-ref"]: set() for component, _ in parts}}
    for component, needed_by in parts:
        for name in needed_by:
            for reference in [root] if name == "mpiad" else references.get(name, []):
                depends[reference].add(component["bom-ref"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": "mpiad",
                "version": metadata["version"],
                "purl": root,
                "licenses": [{"license": {"id": metadata["license"]}}],
            }
        },
        "components": [component for component, _ in parts],
        "dependencies": [{"ref": reference, "dependsOn": sorted(names)} for reference, names in depends.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    found = bill()
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{file}: {len(found['components'])} packages")


if __name__ == "__main__":
    main()
