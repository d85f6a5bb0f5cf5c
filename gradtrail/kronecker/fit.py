"""A fitted curvature: what each layer holds, where its tensors rest, and what it looks like.

A fit is free of damping: one fit serves any.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradtrail.distributed import broadcast_tensor, cost_shards, guarded, rank, world_size
from gradtrail.errors import GradTrailWarning
from gradtrail.kronecker.covariance import KroneckerFactors
from gradtrail.kronecker.curvature import (
    AbstractCurvature,
    DenseCurvature,
    DiagonalCurvature,
    EKFACCurvature,
    KFACCurvature,
)
from gradtrail.kronecker.damping import Damping
from gradtrail.kronecker.report import FitReport, LayerReport, report_layer
from gradtrail.kronecker.symmetric import check_finite, decompose
from gradtrail.progress import progress_bar

__all__ = ["KroneckerFit", "LayerRecord", "Tensors"]

Kind: TypeAlias = Literal["kfac", "ekfac", "dense", "diagonal"]

_SHOWN = 5
_WHAT = {"activation": "covariance A", "gradient": "covariance S"}


class Tensors(Protocol):
    """Where a fit's tensors rest, such as a ``TensorCache``.

    Attributes:
        residency: What kind of place it is.
    """

    residency: str

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor."""

    def get(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Bring a tensor to a device."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass(frozen=True)
class LayerRecord:
    """What is held of one layer.

    Attributes:
        kind: Which curvature.
        keys: Names of its tensors by role; layers that read one input share a name.
        num_positions: Positions with a gradient that were counted, 0 where none are.
    """

    kind: Kind
    keys: Mapping[str, str]
    num_positions: int = 0


@dataclass(eq=False)
class KroneckerFit:
    """Curvature of many layers.

    Attributes:
        method: ``"kfac"`` or ``"ekfac"``.
        tensors: Where the tensors rest.
        device: Where layers are brought to be used.
        num_examples: Examples the fit is a mean over.
        definition: What defines the fit, by field.
        records: What is held, by layer.
    """

    method: Literal["kfac", "ekfac"]
    tensors: Tensors
    device: torch.device
    num_examples: int
    definition: dict[str, str] = field(default_factory=dict)
    records: dict[str, LayerRecord] = field(default_factory=dict)
    _last_input: tuple[str, dict[Damping, Tensor]] = field(default=("", {}), init=False)

    def curvature(self, name: str) -> AbstractCurvature:
        """Bring one layer's curvature to the device.

        Args:
            name: The layer.

        Returns:
            Its curvature.
        """
        record = self.records[name]
        held = {role: self.tensors.get(key, self.device) for role, key in record.keys.items()}
        if record.kind == "kfac":
            key = record.keys["activation_cov"]
            if self._last_input[0] != key:
                self._last_input = (key, {})
            return KFACCurvature(
                name, held["activation_cov"], held["gradient_cov"], self._last_input[1]
            )
        if record.kind == "ekfac":
            return EKFACCurvature(
                name, held["activation_basis"], held["gradient_basis"], held["eigenvalues"]
            )
        if record.kind == "dense":
            return DenseCurvature(name, held["fisher"])
        return DiagonalCurvature(name, held["squares"])

    def add_covariances(self, found: dict[str, KroneckerFactors]) -> None:
        """Take K-FAC's covariances over, layer by layer.

        Args:
            found: By layer; emptied.
        """
        for name in list(found):
            factors = found.pop(name)
            keys = {
                "activation_cov": f"{factors.input_of}:activation_cov",
                "gradient_cov": f"{name}:gradient_cov",
            }
            if factors.input_of == name:
                check_finite(factors.activation_cov_gii, name, "covariance A")
                self.tensors.put(keys["activation_cov"], factors.activation_cov_gii)
            check_finite(factors.gradient_cov_goo, name, "covariance S")
            self.tensors.put(keys["gradient_cov"], factors.gradient_cov_goo)
            self.records[name] = LayerRecord("kfac", keys, factors.num_positions)

    def add_bases(
        self, found: dict[str, KroneckerFactors], *, progress: bool, spread: bool = False
    ) -> None:
        """Decompose covariances, the largest first, and let go of each once it is done.

        Args:
            found: By layer; emptied.
            progress: Whether a bar is shown.
            spread: Whether each rank decomposes some of them, which are the same on every rank,
                and gives them to the others.
        """
        jobs: list[tuple[str, str, Tensor]] = []
        for name in list(found):
            factors = found.pop(name)
            if factors.input_of == name:
                jobs.append((name, "activation", factors.activation_cov_gii))
            jobs.append((name, "gradient", factors.gradient_cov_goo))
            keys = {
                "activation_basis": f"{factors.input_of}:activation_basis",
                "gradient_basis": f"{name}:gradient_basis",
            }
            self.records[name] = LayerRecord("ekfac", keys, factors.num_positions)
        jobs.sort(key=lambda job: job[2].shape[-1])
        if spread and world_size() > 1:
            self._spread(jobs, progress=progress)
        with progress_bar("eigendecomposition", len(jobs), enabled=progress) as bar:
            while jobs:
                name, side, cov_gkk = jobs.pop()
                self.tensors.put(f"{name}:{side}_basis", decompose(cov_gkk, name, _WHAT[side])[1])
                bar.update(1)

    def _spread(self, jobs: list[tuple[str, str, Tensor]], *, progress: bool) -> None:
        """Decompose this rank's covariances, then exchange the bases, one at a time.

        Args:
            jobs: Layer, side and covariance of each; emptied.
            progress: Whether a bar is shown.
        """
        costs = [float(cov.shape[0] * cov.shape[-1] ** 3) for _, _, cov in jobs]
        shares = cost_shards(costs, world_size())
        owners = {number: place for place, share in enumerate(shares) for number in share}
        own: dict[int, Tensor] = {}
        mine = shares[rank()]
        with (
            guarded("eigendecomposition"),
            progress_bar("eigendecomposition", len(mine), enabled=progress) as bar,
        ):
            for number in reversed(mine):
                name, side, cov_gkk = jobs[number]
                own[number] = decompose(cov_gkk, name, _WHAT[side])[1].contiguous()
                bar.update(1)
        for number in reversed(range(len(jobs))):
            name, side, cov_gkk = jobs.pop()
            basis = own.pop(number) if number in own else torch.empty_like(cov_gkk)
            broadcast_tensor(basis, owners[number])
            self.tensors.put(f"{name}:{side}_basis", basis)

    def bases(self, name: str) -> EKFACCurvature:
        """Bring one layer's eigenbases to the device, with eigenvalues that are still zero."""
        keys = self.records[name].keys
        input_gjj = self.tensors.get(keys["activation_basis"], self.device)
        output_goo = self.tensors.get(keys["gradient_basis"], self.device)
        shape = (output_goo.shape[0], output_goo.shape[1], input_gjj.shape[1])
        zeros = input_gjj.new_zeros(()).expand(shape)
        return EKFACCurvature(name, input_gjj, output_goo, zeros)

    def add_eigenvalues(self, name: str, eigenvalues_goj: Tensor) -> None:
        """Complete a layer with its corrected eigenvalues, a mean over examples."""
        check_finite(eigenvalues_goj, name, "corrected eigenvalues")
        record = self.records[name]
        key = f"{name}:eigenvalues"
        self.tensors.put(key, eigenvalues_goj)
        keys = {**record.keys, "eigenvalues": key}
        self.records[name] = LayerRecord(record.kind, keys, record.num_positions)

    def add_direct(self, name: str, kind: Literal["dense", "diagonal"], moments: Tensor) -> None:
        """Take a dense Fisher or a diagonal, a mean over examples."""
        check_finite(moments, name, "dense Fisher" if kind == "dense" else "diagonal")
        role = "fisher" if kind == "dense" else "squares"
        self.tensors.put(f"{name}:{role}", moments)
        self.records[name] = LayerRecord(kind, {role: f"{name}:{role}"})

    def groups(self, name: str) -> int:
        """Groups of a layer with Kronecker structure, 0 of another."""
        record = self.records[name]
        role = {"kfac": "gradient_cov", "ekfac": "gradient_basis"}.get(record.kind)
        return 0 if role is None else self.tensors.get(record.keys[role]).shape[0]

    def warn_flat(self, damping: Damping) -> None:
        """Say which layers are dead, and which the data do not determine without damping.

        Args:
            damping: The damping that will be used.
        """
        dead, short = [], []
        for name in self.records:
            curvature = self.curvature(name)
            if min(curvature.mean_eigenvalues(), default=0.0) <= 0:
                dead.append(name)
            elif damping.strength == 0 and any(part.unseen for part in curvature.spectra()):
                short.append(name)
            del curvature  # before the next layer comes to the device
        for names, what in (
            (dead, "have no gradient anywhere in the training data and score 0"),
            (
                short,
                "have directions that the training data do not reach; with damping=0 these count "
                "nothing. Fit on more examples or damp",
            ),
        ):
            if names:
                shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                warnings.warn(
                    f"{len(names)} layers ({shown}) {what}.", GradTrailWarning, stacklevel=3
                )

    def describe(self, damping: float | None = None, *, relative_damping: bool = True) -> FitReport:
        """Look at every layer's spectrum.

        Args:
            damping: Strength to show the effect of; None means 0.1 of the mean eigenvalue.
            relative_damping: Whether it is relative.

        Returns:
            A report; ``print`` it for a table.
        """
        chosen = Damping.of(damping, relative=relative_damping)
        rows: list[LayerReport] = []
        for name in self.records:
            rows += report_layer(name, self.curvature(name).spectra(), chosen)
        return FitReport(self.method, self.num_examples, tuple(rows))

    def move_to(self, tensors: Tensors) -> None:
        """Bring the tensors to another place and close the one they were in.

        Args:
            tensors: Where they go.
        """
        for key in dict.fromkeys(key for r in self.records.values() for key in r.keys.values()):
            tensors.put(key, self.tensors.get(key))
        self.tensors.close()
        self.tensors = tensors

    def close(self) -> None:
        """Let go of the tensors; files that were made for them are deleted."""
        self.tensors.close()
