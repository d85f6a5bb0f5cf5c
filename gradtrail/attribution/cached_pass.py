"""Passes over one data set that are kept: the first is captured into a store, others read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradtrail.attribution.cached_covariances import CovarianceWatch
from gradtrail.attribution.cached_form import KeptForm, joint_form
from gradtrail.attribution.cached_identity import complete_facts, refuse_other
from gradtrail.attribution.cached_options import CacheOptions
from gradtrail.attribution.data import Rows
from gradtrail.attribution.digest import DataDigest
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.pass_cache import (
    AbstractPassCache,
    Attached,
    Batch,
    BatchSink,
    CapturePass,
    LiveCapture,
)
from gradtrail.attribution.query_source import SourceRows
from gradtrail.attribution.session import Session
from gradtrail.attribution.shares import on_every
from gradtrail.attribution.stored import attached_covariances, rows_between
from gradtrail.distributed import barrier
from gradtrail.factors import DenseGradient, GradientBlock, LayerGradient, select
from gradtrail.store import BackgroundWriter, GradientStore

__all__ = ["StoreCache"]

_FLUSH_SECONDS = 60.0  # most work that a kill can lose, where gradients are small beside a shard


class StoreCache(AbstractPassCache):
    """Answers every pass over one data set with one loss from a store, which it fills first.

    Attributes:
        store: The store.
        is_whole: Whether every row is stored, those of other ranks too.
    """

    store: GradientStore
    is_whole: bool

    def __init__(
        self,
        session: Session,
        data: tuple[Rows, Loss],
        store: GradientStore,
        options: CacheOptions,
        facts: Mapping[str, Any],
    ) -> None:
        """Take a store that is empty, or holds the first rows of the same data.

        Args:
            session: Whose passes are answered.
            data: The rows and their loss.
            store: The store.
            options: The form gradients are kept in.
            facts: What tells them from others.
        """
        self.store = store
        self._session = session
        self._rows, self._loss = data
        self._options = options
        self._facts = facts
        self._projection = session.projection
        self._digest: str | None = facts["data_digest"]
        self._attached: Attached | None = None
        self._is_share = self._rows.whole is not None
        whole = not self._missing()
        self.is_whole = on_every("whole store", flag=whole) if self._is_share else whole

    @property
    def is_factored(self) -> bool:
        """Whether factors can be read back, from which covariances are made at any time."""
        return self._options.capture == "factored"

    @property
    def has_covariances(self) -> bool:
        """Whether covariances of every row are kept beside the store."""
        return self.is_whole and attached_covariances(self.store) is not None

    def covers(self, request: CapturePass) -> bool:
        """Whether a pass is over these rows, with this loss.

        Args:
            request: The pass.

        Returns:
            Passes with other labels, as ``fisher="sampled"`` draws them, run the model.

        Raises:
            ValueError: If the pass wants gradients that are projected otherwise than it was asked.
        """
        if request.rows is not self._rows or request.loss is not self._loss:
            return False
        if self._session.projection != self._projection:
            raise ValueError(
                "projection must be None with gradient_cache_residency for a method that reads "
                f"gradients before they are projected, got {self._projection}. Leave one of them "
                "out."
            )
        return True

    def capture(self, request: CapturePass, live: LiveCapture) -> str:
        """Answer a pass: what is stored is read, the rest is captured and stored.

        Args:
            request: The pass.
            live: Runs the model.

        Returns:
            Digest of the data.
        """
        missing = self._missing()
        self._replay(request.batch_size, request.phase, request.sink, request.done)
        if not self.is_whole:
            self._run(request, live, missing, None)
        return self._known_digest()

    def covariances(self, request: CapturePass) -> Attached | None:
        """Give the covariances that are kept beside the store.

        Args:
            request: The pass they would be accumulated in.

        Returns:
            Tensors and metadata, or None where none cover every row.
        """
        if not self.covers(request) or not self.is_whole:
            return None
        return self._attached or attached_covariances(self.store)

    def fill(self, batch_size: int, phase: str, watch: CovarianceWatch | None) -> None:
        """Capture what is missing, with nobody listening.

        Args:
            batch_size: Rows a batch.
            phase: What the bar says.
            watch: Accumulates the covariances that are kept beside the store, or None.
        """
        runs, every = self._missing(), [range(len(self._rows))]
        if runs and isinstance(self._rows, SourceRows):
            runs = every  # a source runs from its first part
        if self.store.facts is None:
            self._define()
        again = False
        if watch is not None:
            if self.is_factored:
                self._replay(batch_size, phase, watch.add, watch.close)
            else:  # what is written out has no factors: these rows run again
                runs, again = every, self._rows.total > 0
        if again or not self.is_whole:
            request = CapturePass(
                rows=self._rows,
                loss=self._loss,
                batch_size=batch_size,
                phase=phase,
                sink=_ignore,
            )
            self._run(request, self._session.capture_live, runs, watch)
        if watch is not None and self._rows.total:
            self._attached = watch.attach_to(self.store, self._rows, self._session.device)
        if self._session.live is not None:  # also what earlier calls saw a gradient reach
            self._session.live.reached.update(self.store.layers)

    def _define(self) -> None:
        """Say what is captured, or check it: the model was probed since the store was opened."""
        facts = complete_facts(self._facts, self._session, self._loss)
        refuse_other(self.store, facts, self._options)
        if self.store.facts is None:
            self.store.define(**facts)

    def _known_digest(self) -> str:
        if self._digest is None:
            self._digest = "" if self._is_share else DataDigest().hexdigest()
        return self._digest

    def _missing(self) -> list[range]:
        """Rows of this rank that are not stored, by their numbers among its own."""
        first, count = self._rows.first, len(self._rows)
        ids = self.store.ids
        if ids == tuple(range(first, first + len(ids))):
            return [range(len(ids), count)] if len(ids) < count else []
        held = {number - first for number in ids}
        runs: list[range] = []
        for row in range(count):
            if row in held:
                continue
            if runs and runs[-1].stop == row:
                runs[-1] = range(runs[-1].start, row + 1)
            else:
                runs.append(range(row, row + 1))
        return runs

    def _replay(
        self, batch_size: int, phase: str, sink: BatchSink, done: Callable[[Batch], None] | None
    ) -> None:
        """Read what is stored."""
        for run in _between(self._missing(), len(self._rows)):
            first = self._rows.first
            rows = rows_between(self.store, "cache_dir", range(run.start + first, run.stop + first))
            self._session.capture(
                replace(rows, start=run.start),
                self._loss,
                batch_size=batch_size,
                phase=phase,
                sink=sink,
                done=done,
            )

    def _run(
        self,
        request: CapturePass,
        live: LiveCapture,
        runs: Sequence[range],
        watch: CovarianceWatch | None,
    ) -> None:
        """Run the model on some rows, and store those that are not."""
        self._define()
        missing = self._missing()
        written = {name: layer.kinds == ("dense",) for name, layer in self.store.layers.items()}
        form = joint_form(self._session, request, self._options, written)
        with BackgroundWriter(self.store) as writer:  # after an error, what was captured is stored
            tee = _Tee(request, self.store, writer, form, watch, missing)
            digest = live(replace(request, sink=tee.add, done=tee.close), runs)
            writer.flush()
        if self._is_share:
            barrier("stored gradients")
        self.is_whole = True
        if self._digest is None:
            self._digest = digest


class _Tee:
    """Hands a pass's gradients to its sink and, batch by batch, to a store."""

    def __init__(
        self,
        request: CapturePass,
        store: GradientStore,
        writer: BackgroundWriter,
        form: KeptForm,
        watch: CovarianceWatch | None,
        missing: Sequence[range],
    ) -> None:
        """Look at what the store holds.

        Args:
            request: The pass.
            store: The store.
            writer: Writes to it.
            form: The form gradients are kept in.
            watch: Sees gradients before they are written out, or None.
            missing: Rows of the pass that are not stored.
        """
        self._request = request
        self._writer = writer
        self._flushed = time.monotonic()
        self._watch = watch
        self._missing = missing
        self._first = request.rows.first
        self._step = max((record.step + 1 for record in store.records), default=0)
        self._form = form
        self._layers: dict[str, LayerGradient] = {}

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Take one layer of one batch.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients.
        """
        kept = self._form.of(name, gradient)
        if self._watch is not None:
            self._watch.add(place, name, gradient if isinstance(kept, DenseGradient) else kept)
        self._layers[name] = kept
        self._request.sink(place, name, kept)

    def close(self, place: Batch) -> None:
        """End a batch: its rows that are not stored yet are.

        Args:
            place: The batch.
        """
        layers, self._layers = self._layers, {}
        for run in self._missing:
            start = max(run.start, place.start)
            stop = min(run.stop, place.start + place.size)
            if start < stop:
                self._submit(place, layers, slice(start - place.start, stop - place.start))
        self._form.end_batch()
        if self._watch is not None:
            self._watch.close(place)
        if self._request.done is not None:
            self._request.done(place)

    def _submit(self, place: Batch, layers: Mapping[str, LayerGradient], part: slice) -> None:
        """Store some rows of a batch as one block."""
        if part != slice(0, place.size):
            layers = {name: select(one, part) for name, one in layers.items()}
        first = self._first + place.start
        ids = tuple(range(first + part.start, first + part.stop))
        block = GradientBlock(self._step, ids, layers)
        self._writer.submit(block, _meta(place, part, ids[0]))
        self._step += 1
        self._flush_now_and_then()

    def _flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()


def _meta(place: Batch, part: slice, first: int) -> dict[str, Any]:
    """What a block must remember of its batch, fit for JSON."""
    left = place.padding_left
    return {
        "start": first,
        "size": part.stop - part.start,
        "tokens": place.tokens,
        "padding_left": None if left is None else left[part].tolist(),
        "lengths": place.lengths[part].tolist(),
    }


def _between(runs: Sequence[range], count: int) -> list[range]:
    """The rows of so many that are in no run, as runs."""
    stops = [0, *(run.stop for run in runs)]
    starts = [*(run.start for run in runs), count]
    pairs = zip(stops, starts, strict=True)
    return [range(start, stop) for start, stop in pairs if start < stop]


def _ignore(_place: Batch, _name: str, _gradient: LayerGradient) -> None:
    """Stand in for a sink where only the store is filled."""
