"""One attribution call: the model, what is captured of it, and passes over data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.attribution.data import Rows, move_batch
from gradtrail.attribution.digest import DataDigest, content_ids, model_digest
from gradtrail.attribution.losses import AbstractLoss, Loss
from gradtrail.attribution.pass_cache import (
    AbstractPassCache,
    Attached,
    Batch,
    BatchSink,
    CapturePass,
)
from gradtrail.attribution.query_source import QueryBatch, QuerySum, SourceRows
from gradtrail.attribution.shares import most_of
from gradtrail.attribution.stored import StoredRows, attached_covariances, replay
from gradtrail.attribution.stored_model import StoredModel
from gradtrail.distributed import gather_json, is_main
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import LayerGradient, Projection, project
from gradtrail.hooks import LivePass, Selection, first_tensor, tokens_of
from gradtrail.hooks.wrapped import communicates
from gradtrail.progress import progress_bar

__all__ = ["Batch", "Session"]


_PROBED_ROWS = 4
# passes that read the training data under another name
_DATA_OF = {"covariances": "train", "eigenvalues": "train"}

Sink = Callable[[str, LayerGradient], None]


@dataclass(eq=False)
class Session:
    """A model that is being attributed, or stored gradients of one.

    Attributes:
        model: The model, or None where every pass reads a store.
        selection: The layers to capture, or None without a model.
        device: Where the batches go.
        projection: Compression of every layer's gradient, or None.
        progress: Whether bars are shown.
        seed: Seed of what a method draws.
        checkpoint: Number of the checkpoint in the model, or None.
        cache: Answers passes whose gradients are stored, or None.
        stored: The layers of the stores, in place of a model, or None.
        live: The pass that is open, or None.
        is_shared: Whether every rank has passed over its share of the training data.
        notes: What a method wants recorded with its result, fit for JSON.
    """

    model: nn.Module | None
    selection: Selection | None
    device: torch.device
    projection: Projection | None = None
    progress: bool = True
    seed: int = 0
    checkpoint: int | None = None
    cache: AbstractPassCache | None = None
    stored: StoredModel | None = None
    live: LivePass | None = field(default=None, init=False)
    is_shared: bool = field(default=False, init=False)
    notes: dict[str, Any] = field(default_factory=dict, init=False)
    _captured: int = field(default=0, init=False)
    _replays: bool = field(default=False, init=False)
    _data: dict[str, str] = field(default_factory=dict, init=False)
    _share: DataDigest | None = field(default=None, init=False)

    @contextmanager
    def opened(
        self, rows: Rows, loss: AbstractLoss, other: tuple[Rows, AbstractLoss] | None = None
    ) -> Iterator[None]:
        """Freeze the model for the passes made inside.

        Args:
            rows: Rows to find out with where the layers hold the batch.
            loss: How the model is run on them.
            other: Rows that will run with a loss of their own, or None.

        Yields:
            Nothing.
        """
        if isinstance(rows, SourceRows):  # where layers hold the batch is read off single rows
            plain, run = rows.source.probe()
            rows, loss = plain, Loss(run)
        with LivePass(self.model, self.selection) as live:
            self.live = live
            if len(rows):
                # the longest of the first rows: one position says little about where the batch is
                lengths = [
                    tokens_of(rows.batch([row])) for row in range(min(len(rows), _PROBED_ROWS))
                ]
                order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
                live.probe(
                    lambda places: self._run(rows, loss, [order[place] for place in places]),
                    max(lengths),
                    len(lengths),
                    None if other is None else lambda: self._run(*other, [0]),
                )
            self.selection = live.selection
            yield
            self._warn_unreached()
        self.live = None

    def capture(
        self,
        rows: Rows,
        loss: AbstractLoss,
        *,
        batch_size: int | None,
        phase: str,
        sink: BatchSink,
        done: Callable[[Batch], None] | None = None,
    ) -> None:
        """Capture every example's gradient, one pass over the data, or read it from a store.

        Args:
            rows: The data, or rows of a store.
            loss: One value an example, or several for a backward each; a store has its own.
            batch_size: Rows a batch; None takes a store's blocks as they are.
            phase: What the bar says.
            sink: Receives ``(batch, layer name, gradient)`` inside each backward.
            done: Called after each backward: once a batch, or as often as the loss asks for.
        """
        request = CapturePass(
            rows=rows, loss=loss, batch_size=batch_size, phase=phase, sink=sink, done=done
        )
        self.is_shared |= rows.whole is not None
        if isinstance(rows, StoredRows):
            digest = self._replay(request)
        elif self.cache is not None and self.cache.covers(request):
            run = self._captured
            digest = self.cache.capture(request, self.capture_live)
            self._replays |= self._captured < run + len(rows)
        else:
            digest = self.capture_live(request)
        self._data[_DATA_OF.get(phase, phase)] = digest

    def covariances(self, rows: Rows, loss: AbstractLoss) -> Attached | None:
        """Give covariances that were accumulated while all of some rows were stored.

        Args:
            rows: The training data.
            loss: Its loss.

        Returns:
            Tensors and metadata, or None where there are none.
        """
        if isinstance(rows, StoredRows):
            return attached_covariances(rows.store, (rows.whole or rows).records)
        if self.cache is None:
            return None
        request = CapturePass(
            rows=rows, loss=loss, batch_size=1, phase="covariances", sink=lambda *_: None
        )
        return self.cache.covariances(request) if self.cache.covers(request) else None

    def _replay(self, request: CapturePass) -> str:
        rows = request.rows
        with self._bar(request.phase, len(rows)) as bar:
            for place in replay(
                rows,
                batch_size=request.batch_size,
                device=self.device,
                sink=request.sink,
                done=request.done,
            ):
                bar.update(place.size)
        return rows.digest

    def capture_live(self, request: CapturePass, runs: Sequence[range] | None = None) -> str:
        """Run the model on the rows of a pass.

        Args:
            request: The pass.
            runs: The rows that are run, or None for all; a source of queries is run as a whole.

        Returns:
            Digest of the rows that ran; empty for a rank's share, which ``digests`` joins.
        """
        runs = [range(len(request.rows))] if runs is None else runs
        self._captured += sum(map(len, runs))
        is_share = request.rows.whole is not None
        self.is_shared |= is_share
        digest = DataDigest(of_share=is_share)
        if is_share:
            self._share = digest
        if isinstance(request.rows, SourceRows):
            self._capture_source(request, digest)
        else:
            self._capture_rows(request, runs, digest)
        return "" if is_share else digest.hexdigest()

    def _capture_rows(
        self, request: CapturePass, runs: Sequence[range], digest: DataDigest
    ) -> None:
        rows, loss, done = request.rows, request.loss, request.done
        missing = self._missing_batches(request, runs)
        batches = (batch for run in runs for batch in rows.batches(request.batch_size, run))
        with self._bar(request.phase, len(rows)) as bar:
            bar.update(len(rows) - sum(map(len, runs)))
            for start, size, raw in batches:
                values = move_batch(raw, self.device)
                place = _place(start, size, values)
                digest.add(content_ids(values, size))

                def receive(name: str, gradient: LayerGradient, place: Batch = place) -> None:
                    if self.projection is not None:
                        gradient = project(name, gradient, self.projection)
                    request.sink(place, name, gradient)

                for losses in loss.rounds(self.model, values, rows.first + start):
                    self.live.run(
                        losses,
                        batch=size,
                        tokens=place.tokens,
                        sink=receive,
                        several=loss.several,
                        done=None if done is None else partial(done, place),
                    )
                bar.update(size)
        for _ in range(missing):
            values = move_batch(rows.whole.batch([0]), self.device)
            for losses in loss.rounds(self.model, values, 0):
                self.live.run(
                    losses,
                    batch=1,
                    tokens=tokens_of(values),
                    sink=lambda *_: None,
                    several=loss.several,
                )

    def _missing_batches(self, request: CapturePass, runs: Sequence[range]) -> int:
        """How many more batches another rank has, where a forward needs every rank.

        As many are run beside the own ones; what they give counts nowhere.

        Args:
            request: The pass.
            runs: Its rows that this rank runs.

        Returns:
            Their number.
        """
        if request.rows.whole is None or not communicates(self.model):
            return 0
        own = sum(-(-len(run) // request.batch_size) for run in runs)
        return most_of("batches of a pass", own) - own

    def _bar(self, phase: str, total: int) -> Any:  # noqa: ANN401  # a context manager
        """Show progress; of many processes the first one's."""
        return progress_bar(phase, total, enabled=self.progress and is_main())

    def run_part(self, rows: SourceRows, batch: QueryBatch, sink: Sink) -> Tensor:
        """Run one batch of a query source.

        Args:
            rows: The queries.
            batch: The batch, of the source of ``rows``.
            sink: Receives ``(layer name, gradient)`` of the batch's parts.

        Returns:
            The losses of the rows of the model's batch.
        """
        values = move_batch(batch.values, self.device)

        def receive(name: str, gradient: LayerGradient) -> None:
            gradient = rows.source.fold(gradient)
            if self.projection is not None:
                gradient = project(name, gradient, self.projection)
            sink(name, gradient)

        with rows.source.active():
            losses, _ = self.live.run(
                lambda: rows.source.loss(self.model, values),
                batch=batch.num_rows,
                tokens=batch.tokens,
                sink=receive,
            )
        return losses

    def digests(self) -> dict[str, str]:
        """Digests of the weights and of the data of every pass, by name."""
        if self.is_shared and self._data.get("train") == "":
            self._data["train"] = (self._share or DataDigest(of_share=True)).hexdigest()
        data = {f"{phase}_digest": digest for phase, digest in self._data.items()}
        weights = self.stored.digest if self.model is None else model_digest(self.model)
        return {"model_digest": weights, **data}

    def _capture_source(self, request: CapturePass, digest: DataDigest) -> None:
        """Capture queries that bring their own batches."""
        rows, total = request.rows, QuerySum()
        source = rows.source
        with self._bar(request.phase, source.num_parts) as bar:
            for batch in source.batches(request.batch_size):
                digest.add(batch.ids)
                start, size = (0, 1) if source.is_summed else (batch.start, batch.size)
                lengths = torch.full((size,), batch.tokens)
                place = Batch(start, size, batch.tokens, None, lengths)
                add = total.add if source.is_summed else partial(request.sink, place)
                self.run_part(rows, batch, add)
                if not source.is_summed and request.done is not None:
                    request.done(place)
                bar.update(batch.size)
        if source.is_summed:
            for name, gradient in total.layers.items():
                request.sink(place, name, gradient)
            if request.done is not None:
                request.done(place)

    def _run(self, rows: Rows, loss: AbstractLoss, numbers: Sequence[int]) -> Tensor:
        if isinstance(rows, SourceRows):
            with rows.source.active():
                values = next(iter(rows.source.batches(1))).values
                return rows.source.loss(self.model, move_batch(values, self.device))
        return loss(self.model, move_batch(rows.batch(numbers), self.device))

    def _warn_unreached(self) -> None:
        """Name the layers whose gradient was zero for every example of every pass."""
        # of passes that were not run here it is not known what they reached
        told = self._captured and not self._replays
        if self.is_shared:
            own = [bool(self._captured), self._replays, sorted(self.live.reached)]
            sides = gather_json(own)
            told = any(ran for ran, _, _ in sides) and not any(read for _, read, _ in sides)
            self.live.reached.update(name for _, _, names in sides for name in names)
        missing = self.live.never_reached() if told else ()
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            warnings.warn(
                f"No gradient ever reached {len(missing)} captured layers ({shown}): they are "
                "hooked but never called, or the loss does not depend on them. They score 0.",
                GradTrailWarning,
                stacklevel=6,
            )


def _place(start: int, size: int, batch: object) -> Batch:
    """Read a batch's valid positions off its attention mask."""
    tokens = tokens_of(batch)
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    main = first_tensor(batch)
    if not isinstance(mask, Tensor) or main is None or mask.shape != main.shape[:2] or not tokens:
        return Batch(start, size, tokens, None, torch.full((size,), tokens))
    valid = mask != 0
    lengths = valid.sum(1)
    leading = torch.where(lengths > 0, valid.int().argmax(1), torch.zeros_like(lengths))
    return Batch(start, size, tokens, leading, lengths.cpu())
