"""The example of a causal variable: from training to the plot, as a process and in this one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "causal_variable.py"
CONTROLS = (
    "subspace found",
    "difference of means",
    "placebo of equal length",
    "random direction",
    "labels by lot",
    "untrained model",
)


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("causal_variable", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def check_text(text, shown):
    for name in CONTROLS:
        assert re.search(rf"^  {name}.* \d+\.\d%", text, re.MULTILINE), text
    assert "Training examples that taught it least" in text
    rows = re.findall(
        r"^ +[+-][\d.e+]+  (?:now|then) at \w+ the \w+ \w+ +(\w+)", text, re.MULTILINE
    )
    assert len(rows) == 2 * shown
    return rows


def test_small_run_prints_and_draws(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(example, "EXAMPLES", 120)
    plot = tmp_path / "number.png"
    with torch.random.fork_rng():
        assert example.main(["--pairs", "32", "--shown", "3", "--plot", str(plot)]) == 0
    check_text(capsys.readouterr().out, 3)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000


def test_sentences_are_what_their_group_says(example):
    sentences = example.draw_sentences(example.NOUNS, 200)
    assert {sentence.group for sentence in sentences} == set(example.GROUPS)
    for sentence in sentences:
        _, _, when, _, noun, verb = sentence.words
        singular, plural, past = example.VERBS[when]
        right = plural if noun.endswith("s") else singular
        wrong = singular if noun.endswith("s") else plural
        assert verb == {"agreeing": right, "wrong": wrong, "past tense": past}[sentence.group]


@pytest.mark.slow
def test_example_runs_from_the_command_line():
    run = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = check_text(run.stdout, 6)
    assert rows[:6].count("agreeing") >= 4
    assert rows[6:].count("wrong") >= 4
    found = {name: float(re.search(rf"{name}.*?(\d+\.\d)%", run.stdout)[1]) for name in CONTROLS}
    assert found["subspace found"] >= 90
    assert found["placebo of equal length"] <= 30
    assert found["random direction"] <= 30
    assert found["labels by lot"] <= 75
    assert found["untrained model"] <= 60
