"""What describes the package to others says what is so: metadata, recipe, image, workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dgl_mgpu.version import __version__
from tests.environment import CHECKOUT

PROJECT: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
PACKAGING = CHECKOUT / "packaging"
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
#: conda-forge's names of packages, where they differ from PyPI's.
CONDA = {"torch": "pytorch"}


def of_yaml(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def requirement(line: str) -> tuple[str, set[str]]:
    """A package, and the bounds of its version."""
    line = line.partition(";")[0].strip()  # where it holds, which a recipe says otherwise
    name, bounds = re.fullmatch(r"([\w-]+) *([^ ]*)", line).groups()
    return CONDA.get(name, name), set(filter(None, bounds.split(",")))


def test_citation_and_recipe_are_of_this_version():
    assert of_yaml(CHECKOUT / "CITATION.cff")["version"] == __version__
    assert of_yaml(PACKAGING / "conda" / "recipe.yaml")["package"]["version"] == __version__


def test_the_recipe_requires_what_the_wheel_requires():
    run = of_yaml(PACKAGING / "conda" / "recipe.yaml")["requirements"]["run"]
    expected = [*PROJECT["dependencies"], f"python {PROJECT['requires-python']}"]
    assert sorted(map(requirement, run)) == sorted(map(requirement, expected))


def test_the_image_has_extras_and_copies_what_there_is():
    text = (PACKAGING / "Dockerfile").read_text()
    extras = PROJECT["optional-dependencies"]
    assert set(re.findall(r"VARIANT=(cuda\w+)", text)) == {e for e in extras if "cuda" in e}
    assert set(re.findall(r"extras=(plots),(tensorboard)", text)[0]) <= extras.keys()
    copied = re.findall(r"^!(.*)$", (PACKAGING / "Dockerfile.dockerignore").read_text(), re.M)
    assert copied and all((CHECKOUT / name).exists() for name in copied)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    workflow = of_yaml(path)
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.M))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    words = [word for step in steps for word in step.get("run", "").split()]
    asked = {word for word in words if "=" not in word} - {"make"}
    assert asked and asked <= targets


def test_types_of_the_package_are_for_its_users():
    assert (CHECKOUT / "dgl_mgpu" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]
