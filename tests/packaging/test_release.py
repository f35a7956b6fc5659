"""What a release is made of agrees: versions, workflows, issue forms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpttool

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_everywhere_the_same() -> None:
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    assert f'version: "{ckpttool.__version__}"' in recipe
    assert f"## {ckpttool.__version__}, " in (ROOT / "CHANGELOG.md").read_text() or "dev" in ckpttool.__version__


def test_the_recipe_of_conda_asks_for_what_the_wheel_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    other = {"huggingface-hub": "huggingface_hub", "isal": "python-isal", "ml-dtypes": "ml_dtypes"}
    wanted = [re.match(r"([\w-]+)(.*)", d).groups() for d in project["dependencies"]]  # type: ignore[union-attr]
    assert {f"{other.get(n, n)} {v}" for n, v in wanted} | {"python >=3.11"} == set(recipe["requirements"]["run"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_runs_what_is_there_with_pinned_actions_and_few_rights(file: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [s for job in workflow["jobs"].values() for s in job["steps"]]
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"])
        for target in re.findall(r"make ([\w-]+)", step.get("run", "")):
            assert target in targets
    assert any(s.get("run") == ".ci/run" for s in steps) or file.stem == "release"


def test_the_versions_of_python_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = {c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    assert said == {"3.11", *jobs["check"]["strategy"]["matrix"]["python"]}


@pytest.mark.parametrize("form", ["bug", "layout"])
def test_an_issue_form_asks_for_the_report_that_doctor_writes(form: str) -> None:
    body = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())["body"]
    assert any("ckpttool doctor PATH --report" in field["attributes"].get("label", "") for field in body)
