"""Passes over one data set that are kept: the first is captured into a store, others read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gradtrail.attribution.cached_covariances import CovarianceWatch
from gradtrail.attribution.cached_form import KeptForm
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
from gradtrail.attribution.stored import attached_covariances, stored_rows
from gradtrail.factors import DenseGradient, GradientBlock, LayerGradient, select
from gradtrail.store import BackgroundWriter, GradientStore

__all__ = ["StoreCache"]

_FLUSH_SECONDS = 60.0  # most work that a kill can lose, where gradients are small beside a shard


class StoreCache(AbstractPassCache):
    """Answers every pass over one data set with one loss from a store, which it fills first.

    Attributes:
        store: The store.
    """

    store: GradientStore

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

    @property
    def is_whole(self) -> bool:
        """Whether every row is in the store."""
        return len(self.store) == len(self._rows)

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
        held = len(self.store)
        self._replay(request.batch_size, request.phase, request.sink, request.done)
        if held < len(self._rows):
            self._run(request, live, held, None)
        return self._known_digest()

    def covariances(self, request: CapturePass) -> Attached | None:
        """Give the covariances that are kept beside the store.

        Args:
            request: The pass they would be accumulated in.

        Returns:
            Tensors and metadata, or None where none cover every row.
        """
        held = self.covers(request) and self.is_whole
        return attached_covariances(self.store) if held else None

    def fill(self, batch_size: int, phase: str, watch: CovarianceWatch | None) -> None:
        """Capture what is missing, with nobody listening.

        Args:
            batch_size: Rows a batch.
            phase: What the bar says.
            watch: Accumulates the covariances that are kept beside the store, or None.
        """
        start = len(self.store)
        if start < len(self._rows) and isinstance(self._rows, SourceRows):
            start = 0  # a source runs from its first part
        if self.store.facts is None:
            self._define()
        if watch is not None:
            if self.is_factored:
                self._replay(batch_size, phase, watch.add, watch.close)
            else:
                start = 0  # what is written out has no factors: these rows run again
        if start < len(self._rows):
            request = CapturePass(
                rows=self._rows,
                loss=self._loss,
                batch_size=batch_size,
                phase=phase,
                sink=_ignore,
            )
            self._run(request, self._session.capture_live, start, watch)
        if watch is not None and len(self._rows):
            watch.attach_to(self.store, len(self._rows))
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
            self._digest = DataDigest().hexdigest()
        return self._digest

    def _replay(
        self, batch_size: int, phase: str, sink: BatchSink, done: Callable[[Batch], None] | None
    ) -> None:
        """Read what is stored."""
        if len(self.store):
            self._session.capture(
                stored_rows(self.store, "cache_dir"),
                self._loss,
                batch_size=batch_size,
                phase=phase,
                sink=sink,
                done=done,
            )

    def _run(
        self, request: CapturePass, live: LiveCapture, start: int, watch: CovarianceWatch | None
    ) -> None:
        """Run the model from a row on, and store the rows that are not."""
        self._define()
        with BackgroundWriter(self.store) as writer:  # after an error, what was captured is stored
            tee = _Tee(request, self.store, writer, self._options, watch)
            digest = live(replace(request, sink=tee.add, done=tee.close), start)
            writer.flush()
        if self._digest is None:
            self._digest = digest


class _Tee:
    """Hands a pass's gradients to its sink and, batch by batch, to a store."""

    def __init__(
        self,
        request: CapturePass,
        store: GradientStore,
        writer: BackgroundWriter,
        options: CacheOptions,
        watch: CovarianceWatch | None,
    ) -> None:
        """Look at what the store holds.

        Args:
            request: The pass.
            store: The store.
            writer: Writes to it.
            options: The form gradients are kept in.
            watch: Sees gradients before they are written out, or None.
        """
        self._request = request
        self._writer = writer
        self._flushed = time.monotonic()
        self._watch = watch
        self._held = len(store)
        self._step = store.records[-1].step + 1 if store.records else 0
        written = {name: layer.kinds == ("dense",) for name, layer in store.layers.items()}
        self._form = KeptForm(options.capture, options.dtype, written)
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
        cut = max(0, self._held - place.start)
        if cut < place.size:
            if cut:
                layers = {name: select(one, slice(cut, None)) for name, one in layers.items()}
            ids = tuple(range(place.start + cut, place.start + place.size))
            self._writer.submit(GradientBlock(self._step, ids, layers), _meta(place, cut))
            self._step += 1
            self._flush_now_and_then()
        self._form.end_batch()
        if self._watch is not None:
            self._watch.close(place)
        if self._request.done is not None:
            self._request.done(place)

    def _flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()


def _meta(place: Batch, cut: int) -> dict[str, Any]:
    """What a block must remember of its batch, fit for JSON."""
    left = place.padding_left
    return {
        "start": place.start + cut,
        "size": place.size - cut,
        "tokens": place.tokens,
        "padding_left": None if left is None else left[cut:].tolist(),
        "lengths": place.lengths[cut:].tolist(),
    }


def _ignore(_place: Batch, _name: str, _gradient: LayerGradient) -> None:
    """Stand in for a sink where only the store is filled."""
