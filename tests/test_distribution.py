"""Files about the package state the same facts: versions, requirements, Pythons, the bill of materials, workflows."""

import ast
import configparser
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSION = SETUP["metadata"]["version"]
RECIPE = yaml.safe_load((ROOT / "distribution" / "conda" / "recipe.yaml").read_text())
SPACK = ast.parse((ROOT / "distribution" / "spack" / "package.py").read_text())


def required(lines=None):
    """The lowest versions of requirements, by name; by default those of setup.cfg."""
    lines = SETUP["options"]["install_requires"].split("\n") if lines is None else lines
    return {canonicalize_name(each.name): str(each.specifier) for each in map(Requirement, filter(None, lines))}


def spack_calls(name):
    """The calls of a directive of Spack: positional arguments and keywords."""
    calls = [node for node in ast.walk(SPACK) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]
    return [([ast.literal_eval(a) for a in c.args], {k.arg: ast.literal_eval(k.value) for k in c.keywords}) for c in calls]


def test_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    ((spack, _),) = spack_calls("version")
    assert str(citation["version"]) == RECIPE["context"]["version"] == spack[0] == changelog[0] == VERSION
    assert changelog[-1] == "0.1.0"


def test_the_conda_recipe_requires_what_setup_cfg_does():
    run = [line for line in RECIPE["requirements"]["run"] if not line.startswith("python ")]
    assert required(run) == required()
    build = [line for line in RECIPE["requirements"]["host"] if line.startswith("setuptools")]
    assert build == ["setuptools >=64"] and 'requires = ["setuptools>=64"]' in (ROOT / "pyproject.toml").read_text()
    assert RECIPE["about"]["summary"] == SETUP["metadata"]["description"]
    assert RECIPE["about"]["license"] == SETUP["metadata"]["license"]


def test_the_spack_package_requires_what_setup_cfg_does():
    found = {}
    for (spec,), keywords in spack_calls("depends_on"):
        name, _, versions = spec.partition("@")
        assert versions.endswith(":")
        found[name] = f">={versions[:-1]}"
        assert keywords["type"] == ("build" if name == "py-setuptools" else ("build", "run"))
    assert found.pop("python") == SETUP["options"]["python_requires"] and found.pop("py-setuptools") == ">=64"
    assert {name.removeprefix("py-"): versions for name, versions in found.items()} == required()


def test_pythons_of_the_classifiers_are_those_of_the_tests():
    classifiers = re.findall(r"Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.MULTILINE)
    (pythons,) = re.findall(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert classifiers == pythons.split() and f">={classifiers[0]}" == SETUP["options"]["python_requires"]


def test_bill_of_materials(tmp_path):
    """Compared with the pins that pip reads."""
    file = tmp_path / "new" / "mpiad.cdx.json"
    subprocess.run([sys.executable, ROOT / ".ci" / "sbom.py", file], check=True, capture_output=True, timeout=60)
    bill = json.loads(file.read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", VERSION)
    lines = re.sub(r"\\\n", " ", (ROOT / ".ci" / "requirements.lock").read_text()).splitlines()
    pins = [line.split(" --hash=sha256:") for line in lines if line and not line.lstrip().startswith("#")]
    expected = [(*pin.partition(" ")[0].split("=="), {each.strip() for each in hashes}) for pin, *hashes in pins]
    found = [(c["name"], c["version"], {each["content"] for each in c["hashes"]}) for c in bill["components"]]
    assert found == expected and len(found) > 50
    scope = {component["name"]: component["scope"] for component in bill["components"]}
    assert all(scope[name] == "required" for name in required()) and scope["pytest"] == scope["sphinx"] == "optional"
    references = {component["bom-ref"] for component in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} == references
    assert all(set(each["dependsOn"]) <= references for each in bill["dependencies"])
    (ours,) = [each["dependsOn"] for each in bill["dependencies"] if each["ref"] == f"pkg:pypi/mpiad@{VERSION}"]
    assert {re.match(r"pkg:pypi/(.*)@", reference)[1] for reference in ours} >= required().keys()


def workflows():
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets():
    text = (ROOT / "Makefile").read_text()
    return {name for line in re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE) for name in line.split()}


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.stem)
def test_hosted_workflows_call_make_with_few_rights(path):
    text, workflow = path.read_text(), yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", use) for use in re.findall(r"uses: (.*)", text))
    rights = [right for job in workflow["jobs"].values() for right in job.get("permissions", {}).items()]
    assert {name for name, right in rights if right == "write"} <= {"id-token", "attestations", "security-events"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        arguments = [each["arguments"] for each in job.get("strategy", {}).get("matrix", {}).get("include", [])]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for command in [c for c in commands if c.startswith("make") and "matrix" not in c] + [
            f"make {a}" for a in arguments
        ]:
            called = re.sub(r"'[^']*'", "", command).split()[1:]
            assert {each for each in called if "=" not in each} <= targets(), command
    assert "${{ github.event" not in text and "pull_request_target" not in text  # what a stranger writes isn't run


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_and_settings_can_be_read(path):
    form = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert form.keys() >= {"name", "description", "body"}
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in form["body"])


@pytest.mark.parametrize("name", ["SECURITY", "CODE_OF_CONDUCT", "GOVERNANCE", "SUPPORT", "RELEASING", "CONTRIBUTING"])
def test_links_of_the_pages_for_contributors_lead_to_files(name):
    text = (ROOT / f"{name}.md").read_text()
    for link in re.findall(r"\]\((?!https?://|#)([^)#]*)", text):
        assert (ROOT / link).exists(), link
    assert not re.search(r"[\w.]+@[\w.]+\.\w+", text)  # no addresses


def test_what_the_recipes_test_is_what_the_wheel_test_runs():
    found = importlib.util.spec_from_file_location("installed_wheel", ROOT / "tests" / "installed_wheel.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.commands_of_recipes() == [
        "python -c 'import mpiad'", "python -c 'import mpiad.inverse'", "python -c 'import mpiad.ensemble'",
        "python -m mpiad", "mpiexec -n 2 python -m mpiad",
    ]  # fmt: skip
