"""The pages on training, optimizers and trajectories: their code runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from training import collate, make_model, make_rows, make_trainer

import gradtrail
from gradtrail import GradTrailCallback, HookManager

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

DOCS = Path(__file__).resolve().parent.parent / "docs"
ELSEWHERE = ("trl.", "olmo_core", "config.gradient_accumulation_steps")  # in environments of theirs
pytestmark = [
    # GPT-2's position table is shared by the batch, and the capture says so
    pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The accelerator's state is global: what one test sets up must not reach the next."""
    yield
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def snippets(page):
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [code for code in found if not any(word in code for word in ELSEWHERE)]


def ground(folder, name):
    """What the pages take for granted: a model, rows, a Trainer and its arguments, a loop."""

    def arguments_in(target="trainer", **options):
        settings = {"max_steps": 4, "save_steps": 4, "learning_rate": 1e-3, **options}
        return transformers.TrainingArguments(
            str(folder / target), report_to=[], use_cpu=True, disable_tqdm=True,
            logging_strategy="no", per_device_train_batch_size=2, **settings,
        )  # fmt: skip

    class Trainer(transformers.Trainer):
        def __init__(self, model, arguments, **options):
            super().__init__(model, arguments, data_collator=collate, **options)
            self.remove_callback(transformers.PrinterCallback)

    model, rows = make_model(name), make_rows(16)
    blocks = []
    return {
        "model": model,
        "rows": rows,
        "train": rows,
        "query": make_rows(2, seed=5),
        "arguments": arguments_in(),
        "args": arguments_in(),
        "Trainer": Trainer,
        "TrainingArguments": arguments_in,
        "torch": torch,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loader": [collate(rows[k : k + 2]) for k in (0, 2, 4)],
        "keep": blocks.append,
        "blocks": blocks,
        "GradTrailCallback": GradTrailCallback,
        "HookManager": HookManager,
    }


def run(code, space):
    imported = "from transformers import Trainer\n"  # ours needs no collator to be named
    exec(compile(code.replace(imported, ""), "snippet", "exec"), space)


def test_page_on_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space = ground(tmp_path, "llama")
    space["accelerator"] = accelerate.Accelerator(cpu=True)
    for code in snippets("training.md"):
        if "scaler.step" in code:
            space["scaler"] = torch.amp.GradScaler("cpu")
            loss = space["model"](**space["loader"][0]).loss
            space["scaler"].scale(loss).backward()
        run(code, space)
    assert "dict_keys" in capsys.readouterr().out
    assert space["gradients"].is_closed
    with gradtrail.GradientStore("run/gradients", mode="read") as store:
        assert sorted(set(store.steps)) == [0, 1, 2, 3]


def test_page_on_optimizers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space = ground(tmp_path, "gpt2")
    for batch in space["loader"]:
        space["model"](**batch).loss.backward()
        space["optimizer"].step()
    made = make_trainer(space["model"], tmp_path / "made", rows=space["rows"], max_steps=1)
    made.train()
    (tmp_path / "checkpoint-500").mkdir()
    torch.save(made.optimizer.state_dict(), tmp_path / "checkpoint-500" / "optimizer.pt")
    space["trainer"] = make_trainer(space["model"], tmp_path / "again", rows=space["rows"])
    for code in snippets("optimizer.md"):
        run(code, space)
    assert capsys.readouterr().out.startswith("0 (")
    assert space["states"].steps == (0, 1, 2, 3)


def test_page_on_trajectories(tmp_path, monkeypatch):
    """The replay's scores are those of the stored gradients, as the page says."""
    monkeypatch.chdir(tmp_path)
    space = ground(tmp_path, "llama")
    first, second = snippets("trajectory_methods.md")
    run(first, space)
    stored = space["scores"]
    # the same training again, with the parameters recorded
    space["model"].load_state_dict(make_model("llama").state_dict())
    space["states"].close()
    space["states"] = gradtrail.StepStore(residency="memory")
    run(second, space)
    torch.testing.assert_close(space["scores"].values, stored.values, rtol=1e-3, atol=1e-5)
    assert space["scores"].train_ids == stored.train_ids
    with pytest.raises(ValueError, match=r"got 'sum' where 'model' was recorded"):
        gradtrail.attribute_by_replay(
            HookManager(space["model"]), space["snapshots"], space["queries"], method="adamw",
            optimizer_states=space["states"], progress=False,
        )  # fmt: skip
