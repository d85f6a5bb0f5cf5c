"""Many processes of ``torch.distributed``: shares of the data, sums, joined tensors, errors."""

from gradtrail.distributed.exchange import RankError, agree, barrier, exchange, guarded
from gradtrail.distributed.objects import broadcast_json, gather_json
from gradtrail.distributed.ranks import cost_shards, is_main, rank, shard_of, world_size
from gradtrail.distributed.tensors import (
    broadcast_tensor,
    gather_rows,
    merge_topk,
    reduce_named,
    reduce_sum,
)

__all__ = [
    "RankError",
    "agree",
    "barrier",
    "broadcast_json",
    "broadcast_tensor",
    "cost_shards",
    "exchange",
    "gather_json",
    "gather_rows",
    "guarded",
    "is_main",
    "merge_topk",
    "rank",
    "reduce_named",
    "reduce_sum",
    "shard_of",
    "world_size",
]
