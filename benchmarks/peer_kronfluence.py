"""K-FAC and EK-FAC of kronfluence 1.0.1 on the same work, in its own venv.

The library does not know ``Conv1D``: GPT-2's are turned into ``nn.Linear`` of the same weights
first, outside the clock, which leaves the work the same. Labels are the data's, as in ours, and the
damping is 0.1 of the mean eigenvalue.
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
import workloads
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.module.utils import get_tracked_module_names
from kronfluence.task import Task
from peer_process import run_peer
from torch import Tensor, nn
from torch.nn import functional as F


class CausalLoss(Task):
    """The summed loss of next tokens."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def compute_train_loss(
        self, batch: dict[str, Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        if sample:
            raise ValueError("sample must be False: the empirical Fisher is compared.")
        ids = batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def compute_measurement(self, batch: dict[str, Tensor], model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.names


def with_linears(model: nn.Module, names: list[str]) -> None:
    """Put an ``nn.Linear`` of the same weights in the place of every ``Conv1D``."""
    for name in names:
        old = model.get_submodule(name)
        if type(old).__name__ != "Conv1D":
            continue
        new = nn.Linear(*old.weight.shape)
        new.weight = nn.Parameter(old.weight.detach().t().contiguous())
        new.bias = old.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def attribute(model: nn.Module, work: workloads.Workload, strategy: str) -> None:
    """Fit the factors and score all pairs; the first call turns the model into a tracked one."""
    if not get_tracked_module_names(model):
        names = workloads.block_linears(model, work.model)
        with_linears(model, names)
        prepare_model(model, CausalLoss(names))
    train = workloads.rows(work.num_train, work.tokens, 1)
    query = workloads.rows(work.num_query, work.tokens, 2)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "bench", model, CausalLoss([]), cpu=True, disable_tqdm=True, output_dir=folder
        )
        analyzer.fit_all_factors(
            "factors",
            train,
            per_device_batch_size=work.batch_size,
            factor_args=FactorArguments(strategy=strategy, use_empirical_fisher=True),
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            query,
            train,
            per_device_query_batch_size=work.batch_size,
            per_device_train_batch_size=work.batch_size,
            score_args=ScoreArguments(damping_factor=None),
        )


METHODS = {strategy: partial(attribute, strategy=strategy) for strategy in ("kfac", "ekfac")}

if __name__ == "__main__":
    run_peer(METHODS, __doc__)
