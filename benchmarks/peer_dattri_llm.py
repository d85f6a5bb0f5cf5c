"""GradDot, K-FAC and EK-FAC of dattri-llm 0.1.0 on the same work, in its own venv.

``kfac`` and ``ekfac`` run the model again for every pass, which is that library's default;
``kfac-memory`` and ``ekfac-memory`` keep the captured gradients in memory and freeze all parameters
but the embedding, so that no weight gradients are computed: the fastest settings found for it.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import workloads
from dattri_llm import (
    AttributionArguments,
    AttributionTask,
    EKFACAttributor,
    HookManagerConfig,
    KFACAttributor,
    TracInAttributor,
)
from peer_process import run_peer
from torch import nn

DAMPED = {"damping": 0.1, "relative_damping": True}


def attribute(
    model: nn.Module,
    work: workloads.Workload,
    attributor: type,
    *,
    frozen: bool = False,
    **options: Any,
) -> None:
    """One attribute() call over all training data and queries.

    Args:
        model: The model.
        work: The problem.
        attributor: Class of the method.
        frozen: Whether only the embedding keeps its gradient.
        **options: Options of the method.
    """
    names = workloads.block_linears(model, work.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "wte" in name or "embed_tokens" in name)
    hooks = HookManagerConfig(hook_types=dict.fromkeys(names, "linear_io"), include_frozen=frozen)
    with tempfile.TemporaryDirectory() as folder:
        arguments = AttributionArguments(
            folder,
            per_device_train_batch_size=work.batch_size,
            per_device_eval_batch_size=work.batch_size,
        )
        task = AttributionTask(lambda model, batch: model(**batch).loss, model=model)
        attributor(arguments, task=task).attribute(
            workloads.rows(work.num_train, work.tokens, 1),
            workloads.rows(work.num_query, work.tokens, 2),
            hook_config=hooks,
            **options,
        )


METHODS = {"graddot": partial(attribute, attributor=TracInAttributor)}
for method, attributor_class in (("kfac", KFACAttributor), ("ekfac", EKFACAttributor)):
    METHODS[method] = partial(attribute, attributor=attributor_class, **DAMPED)
    METHODS[f"{method}-memory"] = partial(
        attribute,
        attributor=attributor_class,
        frozen=True,
        gradient_cache_residency="memory",
        **DAMPED,
    )

if __name__ == "__main__":
    run_peer(METHODS, __doc__)
