"""K-FAC and EK-FAC of bergson 2.5.1 on the same work, in its own venv.

The library reads models, tokenizers and token rows from folders and writes gradients and scores to
others, in one process: that is its interface, and so it is inside the clock. Labels are the data's,
gradients sums over positions, biases included, and the damping 0.1 of the mean eigenvalue.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from functools import partial
from pathlib import Path

import workloads
from bergson.config.config import (
    DataConfig,
    HessianConfig,
    HessianPipelineConfig,
    IndexConfig,
    InversionConfig,
    PreprocessConfig,
    QuerySetConfig,
    ScoreConfig,
)
from bergson.hessians.pipeline import hessian_pipeline
from datasets import Dataset, disable_progress_bars
from peer_process import run_peer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast


def save(model: nn.Module, work: workloads.Workload, folder: Path) -> tuple[str, str, str]:
    """Write the model with a tokenizer that nothing uses, and the rows; give the three paths."""
    model.save_pretrained(folder / "model")
    words = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
        pad_token="0",
        eos_token="0",
        model_max_length=1024,
    )
    tokenizer.save_pretrained(folder / "model")
    for name, count, seed in (("train", work.num_train, 1), ("query", work.num_query, 2)):
        rows = workloads.rows(count, work.tokens, seed)
        ids = [row["input_ids"].tolist() for row in rows]
        Dataset.from_dict({"input_ids": ids}).save_to_disk(folder / name)
    return tuple(str(folder / name) for name in ("model", "train", "query"))


def attribute(model: nn.Module, work: workloads.Workload, *, corrected: bool) -> None:
    """Fit, precondition the queries and score all pairs."""
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(root)
        path, train, query = save(model, work, folder)
        index = IndexConfig(
            run_path=str(folder / "run"),
            model=path,
            precision="fp32",
            data=DataConfig(dataset=train),
            include_bias=True,
            token_batch_size=work.batch_size * work.tokens,
            filter_modules="lm_head",
        )
        hessian_pipeline(
            index,
            HessianConfig(method="kfac", ev_correction=corrected, use_dataset_labels=True),
            ScoreConfig(),
            PreprocessConfig(),
            HessianPipelineConfig(
                query=QuerySetConfig(dataset=query),
                inversion_cfg=InversionConfig(apply_batch_size=work.batch_size),
            ),
        )


METHODS = {
    "kfac": partial(attribute, corrected=False),
    "ekfac": partial(attribute, corrected=True),
}

if __name__ == "__main__":
    disable_progress_bars()
    run_peer(METHODS, __doc__)
