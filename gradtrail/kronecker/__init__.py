"""Curvature from per-example gradients: covariances, eigenbases, damping, the persisted fit."""

from gradtrail.kronecker.covariance import CovarianceAccumulator
from gradtrail.kronecker.covariance_file import (
    COVARIANCES,
    added_covariances,
    covariance_state,
    covariances_from,
    covariances_name,
    restored_accumulator,
)
from gradtrail.kronecker.covariance_sums import KroneckerFactors
from gradtrail.kronecker.curvature import (
    AbstractCurvature,
    DenseCurvature,
    DiagonalCurvature,
    EKFACCurvature,
    KFACCurvature,
    Spectrum,
)
from gradtrail.kronecker.damping import Damping
from gradtrail.kronecker.fit import KroneckerFit, LayerRecord, Tensors
from gradtrail.kronecker.fit_file import FIT_FILE, load_fit, save_fit, signature
from gradtrail.kronecker.joined import joined_covariances, joined_sums
from gradtrail.kronecker.matrices import Scratch, to_matrices
from gradtrail.kronecker.moments import CorrectedMoments, DenseMoments, DiagonalMoments
from gradtrail.kronecker.report import FitReport, LayerReport

__all__ = [
    "COVARIANCES",
    "FIT_FILE",
    "AbstractCurvature",
    "CorrectedMoments",
    "CovarianceAccumulator",
    "Damping",
    "DenseCurvature",
    "DenseMoments",
    "DiagonalCurvature",
    "DiagonalMoments",
    "EKFACCurvature",
    "FitReport",
    "KFACCurvature",
    "KroneckerFactors",
    "KroneckerFit",
    "LayerRecord",
    "LayerReport",
    "Scratch",
    "Spectrum",
    "Tensors",
    "added_covariances",
    "covariance_state",
    "covariances_from",
    "covariances_name",
    "joined_covariances",
    "joined_sums",
    "load_fit",
    "restored_accumulator",
    "save_fit",
    "signature",
    "to_matrices",
]
