"""The README's code blocks run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def _language_model(folder):
    """Save a tiny Llama with a word tokenizer, as a user would have them on disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["what", "is", "the", "capital", "of", "peru", "lima", "chile", "santiago", "a"]
    words += ["lake", "deep", "cold"]
    vocabulary = {"[UNK]": 0, **{word: place + 1 for place, word in enumerate(words)}}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_language_model_block(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    _language_model(tmp_path / "my-finetuned-model")
    texts = ["the capital of peru is lima", "a deep cold lake", "santiago is the capital of chile"]
    names = {"train_texts": texts, "questions": ["what is the capital of chile"]}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    assert names["scores"].values.shape == (3, 1)
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts)


def test_image_classifier_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 10)
    )
    images = torch.randn(12, 1, 8, 8)
    pairs = [(image, number % 10) for number, image in enumerate(images)]
    names = {"model": model, "train_set": pairs[:8], "test_set": pairs[8:]}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    assert names["helped"].indices.shape == (4, 5)
    assert (names["helped"].values[:, 0] >= names["hurt"].values[:, 0]).all()
    assert (tmp_path / "scores.safetensors").is_file()


def test_curvature_block(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    import gradtrail

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        vocab_size=20,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = [{"input_ids": (ids := torch.randint(0, 20, (5,))), "labels": ids} for _ in range(6)]
    names = {"model": LlamaForCausalLM(config), "train": rows[:4], "query": rows[4:]}
    names["gradtrail"] = gradtrail
    exec(compile(BLOCKS[2], "README.md", "exec"), names)
    assert names["scores"].values.shape == (4, 2)
    assert (tmp_path / "fit" / "fit.safetensors").is_file()


def test_store_block(tmp_path, monkeypatch):
    """Twice, as a user runs it: the second run reads what is there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import gradtrail

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0
    )
    rows = [{"input_ids": (ids := torch.randint(0, 20, (5,))), "labels": ids} for _ in range(6)]
    names = {"model": GPT2LMHeadModel(config), "train": rows[:4], "query": rows[4:]}
    names["gradtrail"] = gradtrail
    found = []
    for _ in range(2):
        exec(compile(BLOCKS[3], "README.md", "exec"), names)
        found.append([names["scores"].values, names["best"].values, names["own"]])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert names["ready"].mode == "read"
    assert names["best"].values.shape == (2, 4)


def test_tables_are_whole():
    """No line between the rows of a table, which would end it."""
    text = (ROOT / "README.md").read_text()
    assert re.search(r"^\|.*\n\n\|", text, re.MULTILINE) is None
    assert "| `trak` |" in text


def test_tools_block():
    from transformers import GPT2Config, GPT2LMHeadModel

    import gradtrail

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": (ids := torch.randint(0, 20, (5,))), "labels": ids} for _ in range(3)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    names = {"model": model, "batch": batch, "train": rows, "query": rows[:1], "loader": [batch]}
    names["gradtrail"] = gradtrail
    with pytest.warns(gradtrail.GradTrailWarning, match=r"transformer\.wpe"):
        exec(compile(BLOCKS[4], "README.md", "exec"), names)
    assert names["manager"].last.layers
    assert len(names["manager"].last.ids) == 3
