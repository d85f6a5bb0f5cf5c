"""The quality benchmark: training and measure are right, and better methods score higher."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "scipy")),
    reason="needs scikit-learn, from the demo extra",
)


@pytest.fixture(scope="module")
def digits():
    path = ROOT / "benchmarks" / "quality" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["digits"]


@pytest.fixture(scope="module")
def data(digits):
    return digits.load()


def one_by_one(digits, data, subsets, seed, epochs):
    """The same training by ``torch.optim``, a model at a time."""
    generator = torch.Generator().manual_seed(seed)
    models = [
        digits.network(state)
        for state in digits.state_dicts(digits.initial(len(subsets), generator))
    ]
    size = subsets.shape[1]
    orders = [torch.rand(subsets.shape, generator=generator).argsort(dim=1) for _ in range(epochs)]
    steps = epochs * (size // digits.BATCH)
    for number, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for order in orders:
            for rows in subsets[number][order[number]].split(digits.BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(data.inputs_ni[rows]), data.targets_n[rows]).backward()
                optimizer.step()
                schedule.step()
    return models


def test_models_trained_side_by_side_are_those_trained_one_by_one(digits, data):
    subsets = digits.random_halves(3)[:, :200]
    parameters = digits.train_models(data, subsets, seed=3, epochs=5)
    losses = digits.query_losses(data, parameters)
    expected = one_by_one(digits, data, subsets, 3, 5)
    states = digits.state_dicts(parameters)
    for state, model, loss in zip(states, expected, losses, strict=True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)
        alone = F.cross_entropy(model(data.inputs_qi), data.targets_q, reduction="none")
        torch.testing.assert_close(loss, alone, rtol=1e-3, atol=1e-4)


def test_correlations_are_spearmans(digits):
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 4, generator=generator).mul(2).round().numpy()  # with ties
    right = left + torch.randn(30, 4, generator=generator).numpy()
    expected = [spearmanr(left[:, q], right[:, q]).statistic for q in range(4)]
    assert digits.rank_correlations(left, right).tolist() == pytest.approx(expected)


def test_scores_that_made_the_truth_are_perfect(digits):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(digits.NUM_TRAIN, 7, generator=generator)
    halves = digits.random_halves(20)
    assert all(len(set(half)) == digits.NUM_TRAIN // 2 for half in halves.tolist())
    truth = torch.stack([scores[half].sum(dim=0) for half in halves])
    assert digits.datamodeling_score(scores, halves, truth) == pytest.approx(1)
    assert digits.datamodeling_score(-scores, halves, truth) == pytest.approx(-1)


def test_a_ceiling_of_figures_without_noise_is_one(digits):
    clean = torch.randn(1, 30, 5, generator=torch.Generator().manual_seed(0))
    assert digits.noise_ceiling(clean.repeat(4, 1, 1)) == pytest.approx(1)
    noisy = clean + torch.randn(4, 30, 5, generator=torch.Generator().manual_seed(1))
    assert 0.5 < digits.noise_ceiling(noisy) < 0.95


def test_data_are_of_the_stated_numbers(data):
    assert len(data.train()) == 1000
    assert len(data.query()) == 200
    assert data.inputs_ni.shape[1] == 64
    assert torch.bincount(data.targets_n).min() > 80


def test_it_prints_writes_and_reads_its_truth(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digits, "EPOCHS", 2)
    arguments = ["--halves", "6", "--seeds", "2", "--threads", str(torch.get_num_threads())]
    arguments += ["--truth", str(tmp_path / "deep" / "truth.safetensors")]
    arguments += ["--only", "graddot", "--output", str(tmp_path / "figures.json")]
    digits.main(arguments)
    first = json.loads((tmp_path / "figures.json").read_text())["results"]["graddot"]
    assert -1 <= first["one"] <= 1
    assert "graddot" in capsys.readouterr().out
    written = (tmp_path / "deep" / "truth.safetensors").stat().st_mtime_ns
    digits.main(arguments)
    second = json.loads((tmp_path / "figures.json").read_text())["results"]["graddot"]
    assert second["one_each"] == first["one_each"]
    assert (tmp_path / "deep" / "truth.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"--truth must name a file made with .*'seeds': '1'"):
        digits.main([*arguments, "--seeds", "1"])


def test_curvature_predicts_retraining_better(digits):
    """Measured on all of it: GradDot .38, EK-FAC .53, the whole Gauss-Newton .61."""
    # two models a half: with one, the rounding of another CPU can cost more than the margin
    found = digits.small(("graddot", "ekfac", "ekfac-cg"), num_seeds=2)
    assert found["ekfac"] - found["graddot"] > 0.08, found
    assert found["ekfac-cg"] - found["ekfac"] > 0.03, found
