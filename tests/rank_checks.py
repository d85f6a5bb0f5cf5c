"""What the processes of ``test_distributed`` run; each function is one check, on every rank."""

import os
import signal
import sys
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from gradtrail.distributed import (
    RankError,
    agree,
    barrier,
    broadcast_json,
    gather_json,
    gather_rows,
    guarded,
    is_main,
    merge_topk,
    rank,
    reduce_sum,
    shard_of,
    world_size,
)


def numbers():
    assert is_main() == (rank() == 0)
    return [rank(), world_size()]


def sums():
    whole = torch.arange(24, dtype=torch.float64).view(4, 6)
    mine = whole * (rank() + 1)
    turned = (whole.t() * (rank() + 1)).t()  # not contiguous
    view = torch.zeros(3, 4)[:, ::2]
    view += rank() + 1
    counts = torch.tensor([rank(), 1])
    required = torch.full((2,), float(rank()), requires_grad=True)
    empty = torch.zeros(0, 5)
    reduce_sum([mine, turned, view, counts, required, empty])
    total = sum(range(1, world_size() + 1))
    assert torch.equal(mine, whole * total)
    assert torch.equal(turned, whole * total)
    assert torch.equal(view, torch.full((3, 2), float(total)))
    assert counts.tolist() == [total - world_size(), world_size()]
    assert required.tolist() == [total - world_size()] * 2
    reduce_sum([])


def refused_sums():
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        try:
            reduce_sum([torch.zeros(2, dtype=dtype)], "covariances")
        except TypeError as error:
            found.append(str(error))
    return found


def sums_of_other_shapes():
    reduce_sum([torch.zeros(2 + rank())], "covariances")


def rows(count, dtype, to):
    """Uneven shares of a matrix come back as the matrix, on every rank or on rank 0."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 2, (count, 3, 2), generator=generator).to(getattr(torch, dtype))
    share = shard_of(count, rank(), world_size())
    got = gather_rows(whole[share.start : share.stop], to=to)
    if to == "all" or rank() == 0:
        assert got.dtype == whole.dtype
        assert torch.equal(got, whole)
    else:
        assert got is None
    return len(share)


def rows_of_other_width():
    gather_rows(torch.zeros(2, 3 + rank()), what="scores")


def values():
    mine = {"rank": rank(), "text": "ä" * 10 * rank(), "list": [rank(), 0.5, None]}
    everybody = gather_json(mine)
    assert [one["rank"] for one in everybody] == list(range(world_size()))
    assert everybody[rank()] == mine
    last = world_size() - 1
    assert broadcast_json(mine, last) == {**mine, **everybody[last]}
    assert broadcast_json("only rank 0" if rank() == 0 else None) == "only rank 0"
    assert gather_json(float("inf")) == [float("inf")] * world_size()


def best(count, k, largest):
    """Merged best rows equal those of the whole matrix, also where values are equal."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(0, 4, (count, 5), generator=generator).double()
    share = shard_of(count, rank(), world_size())
    mine = whole[share.start : share.stop]
    order = mine.argsort(dim=0, descending=largest, stable=True)[:k]
    values_kq, index_kq = merge_topk(
        mine.gather(0, order).flip(0), order.flip(0) + share.start, k, largest=largest
    )
    expected = whole.argsort(dim=0, descending=largest, stable=True)[:k]
    assert torch.equal(index_kq, expected)
    assert torch.equal(values_kq, whole.gather(0, expected))


def same_options():
    agree("batch_size", {"batch_size": 4})


def other_options():
    with guarded("setting up"):
        agree("batch_size", 4 + (rank() == 1))


def other_places():
    if rank() == 0:
        barrier("writing the fit")
    else:
        gather_json(1)


def error_in_a_section(failing, batch):
    """A rank fails in its third batch, before a collective that the others have come to."""
    with guarded("setting up"), guarded("scoring"):
        for number in range(5):
            if rank() in failing and number == batch:
                raise ValueError(f"row {number} of rank {rank()} is odd")
            reduce_sum([torch.ones(3)])


def error_at_the_end():
    """All collectives are over when a rank fails."""
    with guarded("writing"):
        barrier("all scored")
        if rank() == 1:
            raise OSError(28, "No space left on device")


def error_that_leaves_the_group_usable():
    for number in range(3):
        try:
            with guarded("trying"):
                barrier("before")
                if rank() == number % world_size():
                    raise KeyError(number)
                barrier("after")
        except (KeyError, RankError):
            pass
    total = torch.ones(1)
    reduce_sum([total])
    return total.item()


def error_where_the_model_communicates():
    """The other ranks wait in a collective that knows nothing of this package."""
    with guarded("scoring", model_communicates=True):
        for number in range(3):
            if rank() == 1 and number == 2:
                time.sleep(0.3)
                raise ValueError("row 2 is odd")
            dist.all_reduce(torch.ones(1000))


def error_of_every_rank():
    """A call that is refused everywhere, now and again, costs nothing."""
    module = sys.modules[guarded.__module__]
    patience, module._PATIENCE = module._PATIENCE, 15.0  # a busy machine
    found = []
    for _ in range(2):
        try:
            with guarded("scoring", model_communicates=True):
                dist.all_reduce(torch.ones(1000))
                time.sleep(0.1 * rank())
                raise ValueError("an option is odd")
        except ValueError as error:
            found.append(str(error))
    module._PATIENCE = patience
    total = torch.ones(1)
    reduce_sum([total])
    dist.all_reduce(total)
    return [*found, total.item()]


def error_after_the_others_have_ended():
    with guarded("scoring", model_communicates=True):
        if rank() == 1:
            time.sleep(0.3)
            raise ValueError("row 2 is odd")


def error_and_exit():
    """The group lives on in the model, so only the end of the process closes its connections."""
    kept = dist.group.WORLD
    try:
        with guarded("scoring", model_communicates=True):
            if rank() == 1:
                raise ValueError("row 2 is odd")
            dist.all_reduce(torch.ones(1000), group=kept)
    except ValueError:
        os._exit(1)


def killed(model_communicates):
    with guarded("scoring", model_communicates=model_communicates):
        barrier("before")
        if rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if model_communicates:
            dist.all_reduce(torch.ones(3))
        reduce_sum([torch.ones(3)])


def error_inside_fsdp(how):
    """A rank fails in a layer, while the others wait for its part of the weights."""
    mesh = init_device_mesh("cpu", (world_size(),))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    if rank() == 1:
        model[1].register_forward_pre_hook(_fail)
    if how == "fully_shard":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    try:
        with guarded("scoring", model_communicates=True):
            model(torch.ones(2, 4)).sum().backward()
    except ValueError:
        os._exit(1)


def _fail(*_):
    time.sleep(0.3)
    raise ValueError("row 2 is odd")
