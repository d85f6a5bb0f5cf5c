"""Fits that outlive a call: in a folder, and in an attributor that keeps its last one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from gradtrail.attribution.data import Rows
from gradtrail.attribution.digest import DataDigest, content_ids, model_digest
from gradtrail.attribution.shares import on_every
from gradtrail.attribution.stored import StoredRows
from gradtrail.distributed import exchange, guarded, is_main
from gradtrail.errors import CurvatureError
from gradtrail.kronecker import FIT_FILE, KroneckerFit, Tensors, load_fit, save_fit, signature

__all__ = ["FitMemory", "FitPlace", "define_fit"]


class FitMemory:
    """Keeps the last fit of an attributor; an older one is closed once a newer replaced it."""

    def __init__(self) -> None:
        """Start without a fit."""
        self.fit: KroneckerFit | None = None
        self._signature: tuple[int, int, int] | None = None

    def recall(
        self, definition: Mapping[str, str], state: tuple[int, int, int] | None
    ) -> KroneckerFit | None:
        """Give the fit if it is the one that is asked for.

        Args:
            definition: What must define it.
            state: State of the file it must be of, or None without a file.

        Returns:
            The fit, or None.
        """
        if self.fit is None or self.fit.definition != definition:
            return None
        if state is not None and state != self._signature:
            return None
        return self.fit

    def keep(self, fit: KroneckerFit, state: tuple[int, int, int] | None) -> None:
        """Remember a fit and close the one before.

        Args:
            fit: The fit.
            state: State of the file it was saved to or loaded from, or None.
        """
        if self.fit is not None and self.fit is not fit:
            self.fit.close()
        self.fit, self._signature = fit, state

    def close(self) -> None:
        """Close the fit; files that held its tensors are deleted."""
        if self.fit is not None:
            self.fit.close()
        self.fit = self._signature = None


class FitPlace:
    """Where one fit is looked for and kept: a folder, a memory, both or neither."""

    def __init__(
        self,
        directory: str | Path | None,
        memory: FitMemory | None,
        checkpoint: int | None,
        residency: str,
    ) -> None:
        """Look at nothing yet.

        Args:
            directory: The user's folder, or None.
            memory: Keeps the last fit, or None.
            checkpoint: Number of the checkpoint, each of which has a folder of its own, or None.
            residency: Where a fit's tensors must rest.
        """
        self._residency = residency
        self._memory = memory
        self.directory = None if directory is None else Path(directory)
        if self.directory is not None and checkpoint is not None:
            self.directory = self.directory / f"checkpoint-{checkpoint:03d}"

    @property
    def is_somewhere(self) -> bool:
        """Whether a fit can be found or kept."""
        return self.directory is not None or self._memory is not None

    def find(
        self,
        definition: Mapping[str, str],
        make: Callable[[], Tensors],
        device: torch.device,
        *,
        is_shared: bool = False,
    ) -> KroneckerFit | None:
        """Give the fit that was remembered or saved.

        Args:
            definition: What must define it.
            make: Makes what holds a loaded fit's tensors.
            device: Where its layers are used.
            is_shared: Whether every rank asks.

        Returns:
            The fit, or None where there is none yet.
        """
        state = None if self.directory is None else self._state()
        if is_shared:
            self._agree(state)
        if self._memory is not None and (self.directory is None or state is not None):
            fit = self._memory.recall(definition, state)
            if is_shared and not on_every("remembered fit", flag=fit is not None):
                fit = None
            if fit is not None:
                if fit.tensors.residency != self._residency:
                    fit.move_to(make())
                return fit
        if state is None:
            return None
        with ExitStack() as stack:
            tensors = make()
            stack.callback(tensors.close)
            fit = load_fit(self.directory, definition, tensors, device)
            stack.pop_all()  # the fit holds them now
        if self._memory is not None:
            self._memory.keep(fit, state)
        return fit

    def keep(
        self, fit: KroneckerFit, damping: Mapping[str, Any], *, is_shared: bool = False
    ) -> None:
        """Save a new fit and remember it.

        Args:
            fit: The fit, whole.
            damping: Damping it was made for, recorded only.
            is_shared: Whether every rank has it: then the first one saves it.
        """
        if self.directory is not None:
            with guarded("saving a fit") if is_shared else nullcontext():
                if is_main() or not is_shared:
                    save_fit(fit, self.directory, damping)
        if self._memory is not None:
            self._memory.keep(fit, None if self.directory is None else self._state())

    def holds(self, fit: KroneckerFit | None) -> bool:
        """Whether a fit is remembered, so that it must stay open."""
        return fit is not None and self._memory is not None and self._memory.fit is fit

    def _agree(self, state: tuple[int, int, int] | None) -> None:
        """Refuse a folder that some ranks see a fit in and others do not."""
        sees = [found for (found,) in exchange("fit in fisher_dir", int(state is not None))]
        if len(set(sees)) > 1:
            raise CurvatureError(
                f"fisher_dir must be a folder that every rank sees, got {str(self.directory)!r} "
                f"with a fit on ranks {[place for place, one in enumerate(sees) if one]} alone."
            )

    def _state(self) -> tuple[int, int, int] | None:
        """State of the file, after a check that the folder is free or holds a fit."""
        if self.directory.exists() and not self.directory.is_dir():
            raise CurvatureError(
                f"fisher_dir must be a folder, got the file {self.directory}. Pass a folder."
            )
        state = signature(self.directory)
        hidden = {entry.name for entry in self.directory.glob("*")} if state is None else set()
        others = sorted(name for name in hidden if not name.startswith((".", "checkpoint-")))
        if others:
            raise CurvatureError(
                f"fisher_dir must be empty or hold {FIT_FILE}, got {self.directory} with "
                f"{', '.join(others[:3])}. Pass a folder of its own."
            )
        return state


def define_fit(
    model: torch.nn.Module | None,
    rows: Rows,
    batch_size: int | None,
    fields: Mapping[str, Any],
) -> dict[str, str]:
    """Write down what defines a fit; the training data are read, no forward runs.

    Args:
        model: The model, or None with rows of a store, which knows what it was captured from.
        rows: The training data.
        batch_size: Rows read at a time; the digest does not depend on it.
        fields: Further fields, fit for JSON.

    Returns:
        Values by field.
    """
    plain = {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in fields.items()
    }
    return {**plain, **_origin(model, rows, batch_size)}


def _origin(model: torch.nn.Module | None, rows: Rows, batch_size: int | None) -> dict[str, str]:
    """Digests of the weights and of the training data."""
    if isinstance(rows, StoredRows):
        facts = rows.store.facts
        # gradients of weights that changed from step to step belong to their store alone
        weights = facts.checkpoint_digest or f"store {rows.store.run}"
        return {"model_digest": weights, "train_digest": rows.digest}
    digest = DataDigest(of_share=rows.whole is not None)
    for _, size, batch in rows.batches(batch_size):
        digest.add(content_ids(batch, size))
    return {"model_digest": model_digest(model), "train_digest": digest.hexdigest()}
