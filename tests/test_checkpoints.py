"""Checkpoints: every form they come in, weights that do not belong, and the model afterwards."""

import copy
import os
from pathlib import Path

import pytest
import torch
from models import build, rows_of, text_rows, tiny
from safetensors.torch import save_file, save_model
from torch import nn

import gradtrail
from gradtrail.attribution.checkpoints import loaded, weights_of

TRAIN = text_rows((5, 3, 7, 1, 6))
QUERY = text_rows((4, 6), seed=1)


def moved(model, seed=5):
    """The same model after some training."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return other


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_weights(model, expected):
    state = model.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def untied(state, model):
    """Leave out the second name of every tied weight, as files do."""
    seen, kept = set(), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            kept[name] = state[name]
        seen.add(id(value))
    return kept


def as_file(model, folder):
    path = folder / "model.safetensors"
    save_model(model, str(path))
    return path


def as_shards(model, folder):
    state = untied(weights(model), model)
    names = sorted(state)
    for part in range(2):
        shard = {name: state[name] for name in names[part::2]}
        save_file(shard, folder / f"model-{part}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


FORMS = {
    "state dict": lambda model, _: model.state_dict(),
    "state dict without the tied name": lambda model, _: untied(weights(model), model),
    "file": as_file,
    "file by text": lambda model, folder: str(as_file(model, folder)),
    "folder": lambda model, folder: as_file(model, folder).parent,
    "shards": as_shards,
    "callable that loads": lambda model, _: (
        lambda target: target.load_state_dict(model.state_dict())
    ),
    "callable that gives": lambda model, _: lambda _: model.state_dict(),
}


@pytest.mark.parametrize("form", FORMS)
def test_checkpoint_is_in_the_model_for_a_while(form, tmp_path):
    model = tiny()
    other = moved(model)
    own, parameters = weights(model), list(model.parameters())
    with loaded(model, FORMS[form](other, tmp_path)):
        assert_weights(model, weights(other))
        assert model.head.weight is model.embed.weight
    assert_weights(model, own)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_scores_at_a_checkpoint_are_those_of_the_model_there(form, tmp_path):
    model = tiny(torch.float32)
    other = moved(model)
    expected = gradtrail.attribute(other, TRAIN, QUERY, progress=False).values
    scores = gradtrail.attribute(
        model, TRAIN, QUERY, method="tracin", checkpoints=[FORMS[form](other, tmp_path)],
        checkpoint_weights=[0.5], progress=False,
    )  # fmt: skip
    torch.testing.assert_close(scores.values, expected / 2, rtol=1e-5, atol=1e-5)
    assert_weights(model, weights(tiny(torch.float32)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_folder_of_save_pretrained(name, tmp_path):
    """Tied weights are saved once, and the folder holds other files too."""
    model = build(name, torch.float32)
    other = moved(model)
    with torch.no_grad():
        for parameter in {id(p): p for p in other.parameters()}.values():
            parameter.copy_(parameter.contiguous())
    other.save_pretrained(tmp_path)
    with loaded(model, tmp_path):
        assert_weights(model, weights(other))
    assert_weights(model, weights(build(name, torch.float32)))
    with loaded(model, str(tmp_path / "model.safetensors")):
        assert_weights(model, weights(other))


def test_buffers_come_with_a_checkpoint_and_go():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other = copy.deepcopy(model)
    other(torch.randn(9, 3) + 1)
    assert other[1].num_batches_tracked == 1
    own = weights(model)
    with loaded(model, other.state_dict()):
        assert torch.equal(model[1].running_mean, other[1].running_mean)
    assert_weights(model, own)


def test_checkpoint_in_another_dtype_is_cast():
    model = tiny(torch.float32)
    state = {name: value.bfloat16() for name, value in moved(model).state_dict().items()}
    with loaded(model, state):
        assert model.mix.weight.dtype == torch.float32
        assert torch.equal(model.mix.weight, state["mix.weight"].float())


# ---------------------------------------------------------------- what is refused


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def test_weights_of_another_model_are_refused(tmp_path):
    model = tiny(torch.float32)
    state = weights(model)
    own = weights(model)
    cases = [
        (without(state, "mix.weight"), ValueError, r"unexpected \[\] and missing \['mix.weight'\]"),
        ({**state, "new": torch.zeros(1)}, ValueError, r"unexpected \['new'\] and missing \[\]"),
        ({}, ValueError, r"unexpected \[\] and missing \['embed.weight', 'position.weight'"),
        (
            {**state, "mix.weight": torch.zeros(8, 9)},
            ValueError,
            r"this model's shapes, got \(8, 9\) for mix.weight, which is \(8, 8\) here",
        ),
        (
            without(without(state, "embed.weight"), "head.weight"),
            ValueError,
            "missing .*embed.weight",
        ),
        (3, TypeError, "state dicts, paths or callables, got int"),
        (model, TypeError, r"got TinyForCausalLM. Of a model, pass model.state_dict\(\)"),
        (tmp_path / "model.pt", ValueError, "safetensors files or folders that hold them, got"),
        (tmp_path / "missing.safetensors", ValueError, "Save with save_pretrained or safetensors"),
        (tmp_path, ValueError, "or pass a state dict or a callable"),  # an empty folder
        (lambda _: {"new": torch.zeros(1)}, ValueError, r"unexpected \['new'\]"),
    ]
    torch.save(state, tmp_path / "model.pt")
    for checkpoint, error, match in cases:
        with pytest.raises(error, match=match), loaded(model, checkpoint):
            raise AssertionError("was loaded")
        assert_weights(model, own)


def test_nothing_that_could_run_code_is_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("model.pt", "pytorch_model.bin", "model.safetensors"):
        torch.save({"mix.weight": Trap()}, tmp_path / name)
    for path in (tmp_path / "model.pt", tmp_path / "pytorch_model.bin", tmp_path):
        with pytest.raises(Exception, match=r"safetensors|[Hh]eader"), loaded(tiny(), path):
            raise AssertionError("was loaded")
    assert not (tmp_path / "ran").exists()


def test_tied_weights_in_one_place_only():
    """A file that names a tied weight once is whole; one that names it never is not."""
    model = tiny()
    state = weights(moved(model))
    for name in ("embed.weight", "head.weight"):
        with loaded(model, without(state, name)):
            assert torch.equal(model.embed.weight, state["embed.weight"])


# ---------------------------------------------------------------- errors on the way


def test_weights_come_back_after_an_error():
    model = tiny(torch.float32)
    own = weights(model)
    states = [moved(model, seed).state_dict() for seed in (1, 2)]
    with pytest.raises(KeyError, match="inside"), loaded(model, states[0]):
        raise KeyError("inside")
    assert_weights(model, own)
    calls = []

    def loss(model, batch):
        calls.append(model.state_dict()["mix.weight"][0, 0].item())
        if calls[-1] == states[1]["mix.weight"][0, 0].item():
            raise RuntimeError("at the second checkpoint")
        return model(batch["input_ids"], batch["attention_mask"])["logits"].sum((1, 2))

    with pytest.raises(RuntimeError, match="at the second checkpoint"):
        gradtrail.attribute(
            model, TRAIN, QUERY, method="tracin", checkpoints=states, loss=loss, progress=False
        )
    assert len(set(calls)) == 2
    assert_weights(model, own)


def test_weights_come_back_after_a_callable_that_raises_halfway():
    model = tiny(torch.float32)
    own = weights(model)

    def half(model):
        with torch.no_grad():
            model.mix.weight.zero_()
        raise OSError("file is gone")

    with pytest.raises(OSError, match="file is gone"), loaded(model, half):
        raise AssertionError("was loaded")
    assert_weights(model, own)


def test_a_wrong_checkpoint_late_in_the_list_leaves_the_model():
    model = tiny(torch.float32)
    own = weights(model)
    with pytest.raises(ValueError, match="this model's weights"):
        gradtrail.attribute(
            model, TRAIN, QUERY, method="tracin", checkpoints=[model.state_dict(), {}],
            progress=False,
        )  # fmt: skip
    assert_weights(model, own)


def test_weights_of_checkpoints():
    assert weights_of([{}, {}], None) == [1.0, 1.0]
    assert weights_of([{}, {}], (1, 0.5)) == [1.0, 0.5]
    with pytest.raises(ValueError, match="at least one checkpoint, got none"):
        weights_of([], None)
    with pytest.raises(ValueError, match=r"one weight a checkpoint \(2\), got 1"):
        weights_of([{}, {}], [1.0])


def test_real_checkpoints_of_a_training_run(tmp_path):
    """TracIn as it is used: save every few steps, score with the learning rates."""
    model, rows = build("gpt2", torch.float32), rows_of("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    folders = []
    for step in range(3):
        ids = rows[step]["input_ids"].unsqueeze(0)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        folders.append(tmp_path / f"checkpoint-{step}")
        model.save_pretrained(folders[-1])
    at_each = []
    for folder in folders:
        with loaded(model, folder):
            at_each.append(gradtrail.attribute(model, rows, rows[:2], progress=False).values)
    scores = gradtrail.attribute(
        model, rows, rows[:2], method="tracin", checkpoints=[str(folder) for folder in folders],
        checkpoint_weights=[0.05, 0.05, 0.02], progress=False,
    )  # fmt: skip
    expected = 0.05 * at_each[0] + 0.05 * at_each[1] + 0.02 * at_each[2]
    torch.testing.assert_close(scores.values, expected, rtol=1e-5, atol=1e-5)
    assert Path(folders[0] / "model.safetensors").is_file()
