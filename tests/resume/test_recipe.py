"""Recipes are looked over before ranks start, and what build() gives before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.errors import UsageError
from ckpttool.resume import verify as launch
from ckpttool.resume.job.build import Job, _list_repeated_blocks
from ckpttool.resume.job.user_job import check_batches_fit_model, check_job_source
from ckpttool.resume.trace import batches
from ckpttool.resume.trace.live_facts import read_optimizer_numbers, to_plain_param_groups

GOOD = "def build(mesh, *, device='cpu'):\n    pass\n"


@pytest.mark.parametrize(
    "text",
    [GOOD, "from other import build\n", "from other import *\n", "build = make(3)\n", "def build(tokenizer=None): pass\n", "class build: pass\n",
     "if True:\n    def build(): pass\n", "try:\n    import x\nexcept ImportError:\n    pass\nelse:\n    build = x.build\n",
     "for name in ('build', 'other'):\n    globals()[name] = print\n",
     "@lru_cache\ndef build(anything): pass\n", "def __getattr__(name): pass\n", "def build(*a, **k): pass\n"],
)  # fmt: skip
def test_a_recipe_that_may_work_is_not_refused_and_never_runs(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.py").write_text("raise SystemExit('it ran')\n" + text)
    check_job_source(f"{tmp_path / 'r.py'}:build")


@pytest.mark.parametrize(
    ("text", "said"),
    [("def make(): pass\ndef other(): pass\n", r"r\.py has no function build\. It defines make, other\."), ("x = 3\n", "has no function build"),
     ("def build(:\n", r"r\.py, line 1 is not Python"), ("def build(tokenizer, mesh): pass\n", r"build\(\) requires tokenizer, but"),
     ("def build(*, path): pass\n", "requires path"), ("def build(a, /, b=1): pass\n", "requires a,"), ("\0", "is not Python")],
)  # fmt: skip
def test_a_recipe_that_cannot_work_is_refused_by_its_text(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(UsageError, match=said):
        check_job_source(f"{tmp_path / 'r.py'}:build")


def test_modules_are_found_as_the_ranks_will_find_them_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "jobs" / "llama"
    inner.mkdir(parents=True)
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('it ran')")
    (inner / "recipe.py").write_text(GOOD)
    (tmp_path / "single.py").write_text("def other(): pass")
    monkeypatch.chdir(tmp_path)
    check_job_source("jobs.llama.recipe:build")
    check_job_source("math:build")  # of C: nothing is known before it is imported
    with pytest.raises(UsageError, match="no function main"):
        check_job_source("jobs.llama.recipe:main")
    with pytest.raises(UsageError, match=r"no function build\. It defines other"):
        check_job_source("single")
    for absent in (
        "jobs.none:build",
        "jobs.llama.recipe.deeper:build",
        "nowhere:build",
        "no-name:build",
        "jobs/single:build",
    ):
        with pytest.raises(UsageError, match="there is no module"):
            check_job_source(absent)
    with pytest.raises(UsageError, match=r"Did you mean jobs/llama/recipe\.py:build\?"):
        check_job_source("jobs/llama/recipe:build")
    with pytest.raises(UsageError, match="does not exist"):
        check_job_source("jobs/none.py:build")


def test_an_installed_module_comes_before_one_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that somebody else has filled is not searched for the name of one's own package."""
    for place, function in (("site", "build"), ("here", "other")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "my_jobs.py").write_text(f"def {function}(): pass")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path / "here")
    check_job_source("my_jobs:build")


def test_a_recipe_is_looked_over_before_the_checkpoint_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"job='/.*none\.py:build': the file"):
        launch.resume_verify(tmp_path / "absent", job=f"{tmp_path}/none.py:build", device="cpu")


class Tokens(torch.nn.Module):
    def forward(self, tokens: Any) -> Any: ...


class Usual(torch.nn.Module):
    def forward(self, input_ids: Any, labels: Any = None) -> Any: ...


class Masked(torch.nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any) -> Any: ...


def row(n: int = 4) -> Any:
    return np.arange(n)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [(Tokens(), [row()], r"called as forward\(input_ids=\.\.\.\), but Tokens has forward\(tokens"),
     (Usual(), [{"input_ids": row(), "mask": row()}], r"forward\(input_ids=\.\.\., mask=\.\.\., labels=\.\.\.\), but Usual"),
     (Masked(), [row()], "missing a required argument: 'attention_mask'"), (Usual(), [{"tokens": row()}], "has tokens, but not input_ids"),
     (Usual(), [np.zeros((1, 4), "i8")], r"input_ids of a sample of build\(\)'s data is int64 of shape \[1, 4\]"),
     (Usual(), [np.zeros(4)], r"is float64 of shape \[4\]"), (Usual(), [row(4), row(5)], r"shape \[4\] in sample 0 .* and \[5\] in sample 1"),
     (Usual(), [{"input_ids": row(), "labels": row()}, {"input_ids": row()}], "labels has shape .* and missing in sample 1"),
     (Usual(), [row(40)], "token 39, but the vocabulary of the model has 31")],
)  # fmt: skip
def test_data_that_the_model_cannot_be_called_with_is_refused_in_a_sentence(model: Any, data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_batches_fit_model(model, None, batches.wrap_user_data(data), 31)


def test_data_that_fits_is_taken_and_a_loss_of_the_user_takes_any() -> None:
    check_batches_fit_model(Usual(), None, batches.wrap_user_data([row()]), 31)
    check_batches_fit_model(Usual(), None, batches.wrap_user_data([{"input_ids": row(), "labels": row()}]), None)
    check_batches_fit_model(torch.nn.parallel.DataParallel(Usual()), None, batches.wrap_user_data([row()]), 31)
    check_batches_fit_model(
        Tokens(), lambda model, batch: (0, 1), batches.wrap_user_data([{"pixels": np.zeros((3, 3))}]), 31
    )
    with pytest.raises(UsageError, match=r"called as loss\(model, batch\), but has \(batch\)"):
        check_batches_fit_model(Tokens(), lambda batch: (0, 1), batches.wrap_user_data([row()]), 31)


def test_a_scheduler_takes_steps_by_itself_unless_they_need_a_metric() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def waits(scheduler: Any) -> bool:
        return Job(None, optimizer, scheduler, None, lambda: None, 0, 1, 1.0, None, []).scheduler_waits

    assert waits(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not waits(torch.optim.lr_scheduler.StepLR(optimizer, 1)) and not waits(None)


def test_blocks_that_share_a_parameter_are_left_to_the_root() -> None:
    model = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4)))
    layers = list(model[0])  # type: ignore[arg-type]
    assert _list_repeated_blocks(model) == layers
    layers[3].weight = layers[1].weight
    assert _list_repeated_blocks(model) == [layers[0], layers[2]]


def test_numbers_in_the_state_of_an_optimizer_are_known_and_tensors_among_its_options_are_compared() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": 7, "gain": 0.5, "on": True, "buffer": torch.ones(1), "kind": "a"}
    optimizer.param_groups[0] |= {"plan": {"warm": (1, 2)}, "sizes": torch.tensor([1.0, 2.0])}
    names = {"step": 7.0, "gain": 0.5, "on": 1.0}
    assert read_optimizer_numbers(model, optimizer) == {f"optim.state.weight.{k}": v for k, v in names.items()}
    (group,) = to_plain_param_groups(model, optimizer)
    assert group["plan"] == {"warm": [1, 2]} and group["sizes"].startswith("float32 (2,) ")
    optimizer.param_groups[0]["sizes"] = torch.tensor([2.0, 1.0])
    assert to_plain_param_groups(model, optimizer)[0]["sizes"] != group["sizes"]
