"""What each process does in the tests of stores that several processes write to."""

import torch
from storing import FACTS

from gradtrail.distributed import rank
from gradtrail.factors import DenseGradient, GradientBlock
from gradtrail.store import GradientStore


def block(step, row):
    layer = f"only {rank()}" if step == 2 else "both"
    return GradientBlock(step, (row,), {layer: DenseGradient(torch.full((1, 3), float(row)), (3,))})


def write(path, mode, steps):
    """Append two blocks a step and rank; what is stored by this rank when it has done so."""
    with GradientStore(path, mode=mode, shard_bytes=1) as store:
        store.define(**{**FACTS, "id_scheme": "index"})
        before = len(store)
        for step in steps:
            for half in range(2):
                store.append(block(step, 4 * step + 2 * half + rank()))
        if 1 in steps:
            store.discard(1)
        return [before, len(store)]
