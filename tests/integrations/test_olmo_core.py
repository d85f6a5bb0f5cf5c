"""OLMo-core's trainer on the CPU, in an environment of its own (``make test-trl``)."""

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

olmo_core = pytest.importorskip("olmo_core", reason="needs ai2-olmo-core: make test-trl")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from olmo_core.data import (  # noqa: E402
    NumpyDataLoaderConfig,
    NumpyFSLDatasetConfig,
    TokenizerConfig,
)
from olmo_core.nn.transformer import TransformerConfig  # noqa: E402
from olmo_core.optim import AdamWConfig  # noqa: E402
from olmo_core.train import Duration, TrainerConfig  # noqa: E402
from olmo_core.train.callbacks import Callback  # noqa: E402
from olmo_core.train.train_module import TransformerTrainModuleConfig  # noqa: E402
from training import Recorder, assert_own_gradients, hooks_on  # noqa: E402

from gradtrail import HookManager, example_id  # noqa: E402
from gradtrail.callbacks import MergedSteps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
LENGTH = 8


class Capture(Callback):
    """Attaches a manager at the first real step: a batch that trains nothing comes before it."""

    manager = None

    def pre_step(self, batch):  # noqa: ARG002
        if self.manager is not None:
            return
        module = self.trainer.train_module
        self.recorder, self.merged, self._stack = Recorder(copies=True), [], ExitStack()
        self.manager = HookManager(
            module.model,
            loss_reduction="model",
            sample_hash_fields=["0"],
            callbacks=[self.recorder, MergedSteps(self.merged.append)],
        )
        self._stack.enter_context(self.manager.collect(module.optim))

    def post_train(self):
        self._stack.close()


def run(folder, callback=None):
    tokens = np.random.default_rng(0).integers(2, 32, 40 * LENGTH, dtype=np.uint8)
    folder.mkdir()
    path = folder / "tokens.npy"
    np.memmap(path, mode="w+", dtype=np.uint8, shape=tokens.shape)[:] = tokens
    tokenizer = TokenizerConfig(vocab_size=32, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    model = TransformerConfig.llama_like(vocab_size=32, d_model=16, n_layers=2, n_heads=2).build(
        init_device="cpu"
    )
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-2),
    ).build(model, device=torch.device("cpu"))
    dataset = NumpyFSLDatasetConfig(
        tokenizer=tokenizer, paths=[str(path)], sequence_length=LENGTH, work_dir=str(folder)
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0, num_workers=0).build(
        dataset
    )
    config = TrainerConfig(
        save_folder=str(folder / "run"),
        device="cpu",
        max_duration=Duration.steps(5),
        no_checkpoints=True,
        metrics_collect_interval=1,
    )
    if callback is not None:
        config = config.with_callback("gradtrail", callback)
    config.build(module, loader).fit()
    return module, torch.from_numpy(tokens.astype(np.int64)).view(-1, LENGTH)


def own_loss(model, row):
    return F.cross_entropy(model(row[None])[0, :-1], row[1:], reduction="sum")


def test_trainer_on_the_cpu(tmp_path):
    bare, _ = run(tmp_path / "bare")
    capture = Capture()
    held, rows = run(tmp_path / "held", capture)
    for mine, theirs in zip(held.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [step.blocks for step in capture.recorder.steps] == [
        (2 * step, 2 * step + 1) for step in range(5)
    ]
    assert [len(block.ids) for block in capture.merged] == [4] * 5
    assert hooks_on(held.model) == 0
    assert_own_gradients(
        capture.recorder, rows, loss=own_loss, key=lambda row: example_id({"0": row})
    )
