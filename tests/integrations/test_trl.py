"""TRL's trainers, with the package installed in an environment of its own (``make test-trl``)."""

import sys
from pathlib import Path

import pytest
import torch

trl = pytest.importorskip("trl", reason="needs trl: make test-trl")
datasets = pytest.importorskip("datasets", reason="needs trl: make test-trl")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training import (  # noqa: E402
    VOCAB,
    Recorder,
    assert_block,
    assert_own_gradients,
    assert_same_training,
    hooks_on,
    make_model,
    make_rows,
)

from gradtrail import CaptureError, GradTrailWarning, example_id  # noqa: E402
from gradtrail.callbacks import GradTrailCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default", "error::gradtrail.GradTrailWarning")


def make_tokenizer():
    """One word a token: w1, w2, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0} | {f"w{number}": number for number in range(1, VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="w1", padding_side="left"
    )


def settings(kind, folder, **arguments):
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return kind(str(folder), **{**defaults, **arguments})


def sft(model, rows, folder, callbacks, **arguments):
    lists = [{"input_ids": row["input_ids"].tolist()} for row in rows]
    return trl.SFTTrainer(
        model,
        args=settings(trl.SFTConfig, folder, **arguments),
        train_dataset=datasets.Dataset.from_list(lists),
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )


def without_dropout(name):
    model = make_model(name)
    if name == "gpt2":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sft_trainer(tmp_path, name, accumulation):
    """Its head runs fused, past the module, and is left out with a word; the rest is exact."""
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make_rows()]
    options = {"gradient_accumulation_steps": accumulation}
    bare = sft(without_dropout(name), rows, tmp_path, [], **options)
    bare.train()
    recorder, merged = Recorder(copies=True), []
    capture = GradTrailCallback([recorder, merged.append])
    held = sft(without_dropout(name), rows, tmp_path, [capture], **options)
    with pytest.warns(GradTrailWarning) as caught:
        held.train()
    assert any("lm_head" in str(one.message) or "wte" in str(one.message) for one in caught)
    assert len(recorder.blocks) == 3 * accumulation
    assert [block.step for block in merged] == [0, 1, 2]
    assert_own_gradients(recorder, rows, key=padded_id)
    for entry in held.state.log_history:
        entry.pop("gradtrail_blocks", None)
    for entry in [*bare.state.log_history, *held.state.log_history]:
        for clock in ("tokens_per_second", "step_time"):
            entry.pop(clock, None)
    assert_same_training(held, bare)
    assert hooks_on(held.model) == 0


def padded_id(row):
    return example_id({"input_ids": row["input_ids"], "labels": row["labels"]})


NOTED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def reward(completions, **_):
    return [float(len(completion) % 5) for completion in completions]


def test_grpo_trainer(tmp_path):
    """A row is a completion with its prompt; ids tell completions of one prompt apart."""
    prompts = datasets.Dataset.from_list([{"prompt": f"w{2 + number} w3"} for number in range(8)])
    recorder, merged, noted = Recorder(copies=True), [], []
    capture = GradTrailCallback(
        [recorder, merged.append],
        loss_reduction="mean",
        loss_scale=0.5,
        sample_hash_fields=["input_ids"],
    )

    class Noting(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            noted.append({name: inputs[name].clone() for name in NOTED})
            return super()._compute_loss(model, inputs)

    def make(callbacks):
        torch.manual_seed(4)
        return Noting(
            make_model("llama"),
            reward_funcs=reward,
            args=settings(
                trl.GRPOConfig,
                tmp_path,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                num_generations=4,
                max_completion_length=6,
                loss_type="grpo",
                max_steps=2,
            ),
            train_dataset=prompts,
            processing_class=make_tokenizer(),
            callbacks=callbacks,
        )

    held = make([capture])
    with pytest.warns(GradTrailWarning):
        held.train()
    assert [len(block.ids) for block in merged] == [8, 8]
    assert hooks_on(held.model) == 0
    rows = {}
    for batch in noted:
        for row in range(4):
            entry = {name: batch[name][row] for name in NOTED}
            prompt = entry["prompt_ids"][entry["prompt_mask"] != 0]
            completion = entry["completion_ids"][entry["completion_mask"] != 0]
            entry |= {"input_ids": torch.cat([prompt, completion]), "kept": len(completion)}
            rows.setdefault(example_id(entry, ["input_ids"]), entry)
    some = 0
    for number, (block, model) in enumerate(zip(recorder.blocks, recorder.models, strict=True)):
        batch = [rows[name] for name in block.ids]
        assert [row["advantages"] for row in batch] == list(noted[number]["advantages"])
        assert_block(capture.manager, block, model, batch, loss=policy_loss)
        some += sum(float(row["advantages"]) != 0 for row in batch)
    assert some > 0


def policy_loss(model, row):
    """One completion's own loss at the policy that wrote it: ratios are 1, none is clipped."""
    logits = model(input_ids=row["input_ids"][None]).logits[0, -row["kept"] - 1 : -1]
    logs = logits.log_softmax(-1).gather(1, row["input_ids"][-row["kept"] :, None])
    return -row["advantages"] * logs.mean()


def test_grpo_trainer_must_be_told_of_its_loss(tmp_path):
    prompts = datasets.Dataset.from_list([{"prompt": f"w{2 + number} w3"} for number in range(8)])
    trainer = trl.GRPOTrainer(
        make_model("llama"),
        reward_funcs=reward,
        args=settings(
            trl.GRPOConfig,
            tmp_path,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
        ),
        train_dataset=prompts,
        processing_class=make_tokenizer(),
        callbacks=[GradTrailCallback()],
    )
    with pytest.raises(CaptureError, match="weights that differ in the log-probabilities"):
        trainer.train()
