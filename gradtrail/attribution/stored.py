"""Rows whose gradients lie in a store: replayed batch by batch, as if a model had run them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.pass_cache import Attached, Batch, BatchSink
from gradtrail.distributed import rank, shard_of, world_size
from gradtrail.factors import (
    DenseGradient,
    JoinMemo,
    LayerGradient,
    LinearFactors,
    SumGradient,
    concatenate,
    map_tensors,
    positions_of,
    to_dense,
)
from gradtrail.kronecker import COVARIANCES, added_covariances, covariances_name
from gradtrail.options import near_numbers
from gradtrail.store import BlockRecord, GradientStore, StoredBlock, records_digest

__all__ = ["StoredRows", "attached_covariances", "replay", "rows_between", "stored_rows"]

_SHARED = 4  # joined inputs that are remembered for more layers that read them


@dataclass(frozen=True, eq=False)
class StoredRows(Rows):
    """The examples of a store where a data set is expected: it has their number.

    Attributes:
        store: The store.
        records: Its blocks that are read, in store order.
        steps: The steps that are read, or None for all.
        layers: The layers that are read, or None for all.
        written: Layers whose gradients are written out as they are read.
        is_part: Whether they are some of the store's rows, which are read by number.
        start: Number of the first row in the pass they are read in.
    """

    store: GradientStore
    records: tuple[BlockRecord, ...]
    steps: tuple[int, ...] | None = None
    layers: tuple[str, ...] | None = None
    written: frozenset[str] = field(default_factory=frozenset)
    is_part: bool = False
    start: int = 0

    @property
    def ids(self) -> tuple[int | str, ...]:
        """Id of every row."""
        return tuple(name for record in self.records for name in record.ids)

    @property
    def row_steps(self) -> tuple[int, ...]:
        """Step of every row."""
        return tuple(record.step for record in self.records for _ in record.ids)

    @property
    def digest(self) -> str:
        """Digest of the data: the capture's own, or of the steps and ids that are read."""
        if isinstance(self.whole, StoredRows):
            return self.whole.digest
        facts = self.store.facts
        if self.steps is None and facts.data_digest is not None:
            return facts.data_digest
        return records_digest(self.records)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Row of the store that every row is."""
        return tuple(
            record.number + place for record in self.records for place in range(len(record.ids))
        )

    def in_form(self, name: str, gradient: LayerGradient) -> LayerGradient:
        """Write a layer's gradient out where that is wanted of it."""
        return to_dense(gradient) if name in self.written else gradient

    def of_layers(self, layers: Sequence[str]) -> StoredRows:
        """The same rows with fewer layers."""
        return replace(self, layers=tuple(layers))

    def share_records(self, batch_size: int | None = None) -> StoredRows:
        """Take this rank's share: whole blocks, contiguous, without duplicates.

        Args:
            batch_size: Keeps blocks together that are joined to one batch of so many rows, as in
                one process; None shares single blocks out.

        Returns:
            The same rows where there is one process.
        """
        world = world_size()
        if world == 1:
            return self
        counts = _blocks_a_batch(self.records, batch_size)
        numbers = shard_of(len(counts), rank(), world)
        start, stop = sum(counts[: numbers.start]), sum(counts[: numbers.stop])
        first = sum(len(record.ids) for record in self.records[:start])
        records = self.records[start:stop]
        return replace(_part(self, records), whole=self, first=first)


def stored_rows(
    store: GradientStore,
    option: str,
    *,
    steps: Sequence[int] | None = None,
    layers: Sequence[str] | None = None,
) -> StoredRows:
    """Make rows of a store.

    Args:
        store: The store.
        option: What the store was passed as, for errors.
        steps: Steps to read; None reads all.
        layers: Layers to read; None reads all.

    Returns:
        The rows, in store order.

    Raises:
        ValueError: If a step is not in the store.
        TypeError: If a step is no number.
    """
    records = store.records
    if steps is not None:
        wanted = set(steps)
        if not all(isinstance(step, Integral) for step in wanted):
            raise TypeError(f"selected_steps must be ints, got {list(steps)[:5]}.")
        known = {record.step for record in records}
        missing = sorted(wanted - known)
        if missing:
            near = near_numbers(missing[0], known)
            raise ValueError(
                f"selected_steps must be among the {len(known)} steps of {option}, got "
                f"{missing[:5]}. Near: {near}."
            )
        records = tuple(record for record in records if record.step in wanted)
        steps = tuple(sorted(wanted))
    count = sum(len(record.ids) for record in records)
    names = None if layers is None else tuple(layers)
    refuse = partial(_refuse_data, option)
    return StoredRows(range(count), refuse, store, tuple(records), steps, names)


def rows_between(store: GradientStore, option: str, run: range) -> StoredRows:
    """Make rows of those of a store whose numbers as rows of a data set are in a range.

    Args:
        store: The store; its ids are numbers of rows, which follow each other in a block.
        option: What the store was passed as, for errors.
        run: The numbers.

    Returns:
        The rows, in their order.
    """
    rows = stored_rows(store, option)
    found = []
    for record in rows.records:
        inside = [place for place, number in enumerate(record.ids) if number in run]
        if inside:
            ids = record.ids[inside[0] : inside[-1] + 1]
            found.append(replace(record, ids=ids, number=record.number + inside[0]))
    return rows if tuple(found) == rows.records else _part(rows, found)


def _part(rows: StoredRows, records: Sequence[BlockRecord]) -> StoredRows:
    """Some of the rows, as records that may be cut."""
    count = sum(len(record.ids) for record in records)
    return replace(rows, dataset=range(count), records=tuple(records), is_part=True)


def _refuse_data(option: str, _: Sequence[Any]) -> Any:  # noqa: ANN401
    raise TypeError(f"{option} must be read as gradients, got a request for its data.")


def attached_covariances(
    store: GradientStore, records: Sequence[BlockRecord] | None = None
) -> Attached | None:
    """Read the covariances that were accumulated while a store was written.

    Those that several processes accumulated, each of what it stored, are added up.

    Args:
        store: The store.
        records: The blocks they must cover, no more and no fewer; None means every one.

    Returns:
        Tensors and metadata, or None where there are none of exactly these blocks.
    """
    wanted = store.records if records is None else records
    covered, found = records_digest(wanted), store.attached(COVARIANCES)
    if found is not None and found[1].get("covers") == covered:
        return found
    parts = _parts_of_ranks(store, wanted, found)
    return None if parts is None else added_covariances(parts, covered)


def _parts_of_ranks(
    store: GradientStore, wanted: Sequence[BlockRecord], first: Attached | None
) -> list[Attached] | None:
    """Read what each process accumulated of what it stored; None unless that is all of the blocks.

    Args:
        store: The store.
        wanted: The blocks they must cover.
        first: What the first process attached, or None.

    Returns:
        Tensors and metadata of every process that stored some of them.
    """
    ranks = {
        record.number: entry.rank
        for record, entry in zip(store.records, store.log.entries, strict=True)
    }
    own: dict[int, list[BlockRecord]] = {}
    for record in wanted:
        own.setdefault(ranks[record.number], []).append(record)
    if own.keys() <= {0}:
        return None
    parts: list[Attached] = []
    for place, records in sorted(own.items()):
        part = store.attached(covariances_name(place)) if place else first
        if part is None or part[1].get("covers") != records_digest(records):
            return None
        parts.append(part)
    return parts


def replay(
    rows: StoredRows,
    *,
    batch_size: int | None,
    device: torch.device,
    sink: BatchSink,
    done: Callable[[Batch], None] | None = None,
) -> Iterator[Batch]:
    """Hand stored gradients on as a pass over data does, layer by layer.

    A layer is read when its turn comes and let go before the next batch is asked for. A batch of
    one block hands on the block's own tensors; several blocks are joined layer by layer.

    Args:
        rows: The rows.
        batch_size: Blocks are joined up to so many rows; None leaves every block as it is.
        device: Where the gradients go.
        sink: Receives ``(batch, layer name, gradient)``.
        done: Called after the layers of a batch, or None.

    Yields:
        Where each batch stands among the rows, after it was handed on.
    """
    counts = _blocks_a_batch(rows.records, batch_size)
    chosen = {"rows": rows.numbers} if rows.is_part else {"steps": rows.steps}
    blocks = iter(rows.store.blocks(**chosen, layers=rows.layers, device=device))
    start = rows.start
    for count in counts:
        # layers of a block are read when asked for: blocks that wait for others hold no tensors
        group = [next(blocks) for _ in range(count)]
        place = _hand_on(group, start, rows, sink, device)
        group.clear()
        if done is not None:
            done(place)
        start += place.size
        yield place


def _blocks_a_batch(records: Sequence[BlockRecord], batch_size: int | None) -> list[int]:
    """How many blocks make each batch: as many in a row as do not exceed its size."""
    if batch_size is None:
        return [1] * len(records)
    counts: list[int] = []
    size = 0
    for record in records:
        if counts and size + len(record.ids) <= batch_size:
            counts[-1] += 1
            size += len(record.ids)
        else:
            counts.append(1)
            size = len(record.ids)
    return counts


def _hand_on(
    group: Sequence[StoredBlock],
    start: int,
    rows: StoredRows,
    sink: BatchSink,
    device: torch.device,
) -> Batch:
    """Give every layer of a batch to the sink."""
    place: Batch | None = None
    memo = JoinMemo(limit=_SHARED)
    # layers that read one input are told by its tensor, which is one as long as it is alive
    inputs: deque[list[Tensor]] = deque(maxlen=_SHARED)
    for name in dict.fromkeys(name for one in group for name in one.block.layers):
        gradient = rows.in_form(name, _joined(name, group, memo, inputs))
        if place is None:
            place = _place(group, start, max(positions_of(gradient), default=0), device)
        sink(place, name, gradient)
        del gradient  # before the next layer is read
    return place or _place(group, start, 0, device)


def _joined(
    name: str, group: Sequence[StoredBlock], memo: JoinMemo, inputs: deque[list[Tensor]]
) -> LayerGradient:
    """Read one layer of all blocks of a batch, and join its gradients.

    Args:
        name: The layer.
        group: The blocks; one that lacks the layer has zeros.
        memo: Keeps joined inputs shared.
        inputs: Keeps the last inputs alive, as they were read.

    Returns:
        The block's own gradient where there is one block.
    """
    pieces = [one.block.layers.get(name) for one in group]
    if len(group) == 1 and isinstance(pieces[0], DenseGradient):
        return pieces[0]  # reads no input
    own = [tensor for piece in pieces for tensor in _inputs_of(piece)]
    if not inputs or not _are_same(own, inputs[-1]):
        inputs.append(own)
    if len(group) == 1:
        return pieces[0]
    like = next(piece for piece in pieces if piece is not None)
    whole = [
        _zeros(like, len(one.block.ids)) if piece is None else piece
        for one, piece in zip(group, pieces, strict=True)
    ]
    return concatenate(whole, memo)


def _inputs_of(gradient: LayerGradient | None) -> list[Tensor]:
    """Inputs that a layer's gradients refer to, which other layers may read as well."""
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    return [part.activation_bsi for part in parts if isinstance(part, LinearFactors)]


def _are_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(one is two for one, two in pairs)


def _zeros(like: LayerGradient, rows: int) -> LayerGradient:
    return map_tensors(like, lambda tensor: tensor.new_zeros(rows, *tensor.shape[1:]))


def _place(group: Sequence[StoredBlock], start: int, positions: int, device: torch.device) -> Batch:
    """Where a batch stands; what its blocks do not say of positions is read off a gradient."""
    shapes = [_shape(one, positions) for one in group]
    size = sum(len(lengths) for _, _, lengths in shapes)
    tokens = max(tokens for tokens, _, _ in shapes)
    lengths = torch.cat([lengths for _, _, lengths in shapes])
    leading = None
    if any(left is not None for _, left, _ in shapes):
        leading = torch.cat(
            [torch.zeros_like(own) if left is None else left for _, left, own in shapes]
        ).to(device)
    return Batch(start, size, tokens, leading, lengths)


def _shape(one: StoredBlock, positions: int) -> tuple[int, Tensor | None, Tensor]:
    """Positions of a block's rows, padded ones before the first valid one, and valid ones."""
    meta, size = one.meta or {}, len(one.block.ids)
    tokens = meta.get("tokens")
    if tokens is None:
        return positions, None, torch.full((size,), positions)
    leading, lengths = (_taken(meta.get(name), one) for name in ("padding_left", "lengths"))
    return (
        int(tokens),
        None if leading is None else torch.tensor(leading, dtype=torch.int64),
        torch.full((size,), int(tokens)) if lengths is None else torch.tensor(lengths),
    )


def _taken(values: Sequence[int] | None, one: StoredBlock) -> Sequence[int] | None:
    """What was noted of the rows that a block still has."""
    return values if values is None or one.taken is None else [values[row] for row in one.taken]
