"""What each process does in the tests of callbacks that record."""

import torch
from torch import nn

from gradtrail import GradientStore, HookManager
from gradtrail.callbacks import OffloadCallback
from gradtrail.distributed import rank


def capture(path, mode, backwards):
    """Store the gradients of some backwards, other rows in each process; steps of this one."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientStore(path, mode=mode) as store:
        manager = HookManager(model, callbacks=[OffloadCallback(store)])
        with manager.collect(optimizer):
            for number in range(backwards):
                torch.manual_seed(10 * number + rank())
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
        own = [e for e in store.log.entries if e.rank == store.log.manifest.rank]
        return len({entry.facts["step"] for entry in own})
