"""The algebra of per-example gradients: their factors, inner products and projections."""

from gradtrail.factors.batching import (
    JoinMemo,
    concatenate,
    map_tensors,
    merge_uses,
    move,
    positions_of,
    select,
    tensors_of,
)
from gradtrail.factors.cost import (
    Route,
    accumulation_dtype,
    cheaper_norm_route,
    cheaper_route,
    dense_size,
    prefers_dense,
)
from gradtrail.factors.gram import GramMemo, cross_gram, position_gram
from gradtrail.factors.materialize import materialize, to_dense, widen, write_dense
from gradtrail.factors.norms import paired_products, squared_norm
from gradtrail.factors.products import linear, onednn_is_faster, outer_sums, product, suits_onednn
from gradtrail.factors.projection import Projection, mask_coordinates, project
from gradtrail.factors.types import (
    DenseGradient,
    EmbeddingFactors,
    GradientBlock,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)

__all__ = [
    "DenseGradient",
    "EmbeddingFactors",
    "GradientBlock",
    "GramMemo",
    "JoinMemo",
    "LayerGradient",
    "LinearFactors",
    "Projection",
    "Route",
    "ScaleFactors",
    "SumGradient",
    "accumulation_dtype",
    "cheaper_norm_route",
    "cheaper_route",
    "concatenate",
    "cross_gram",
    "dense_size",
    "linear",
    "map_tensors",
    "mask_coordinates",
    "materialize",
    "merge_uses",
    "move",
    "onednn_is_faster",
    "outer_sums",
    "paired_products",
    "position_gram",
    "positions_of",
    "prefers_dense",
    "product",
    "project",
    "select",
    "squared_norm",
    "suits_onednn",
    "tensors_of",
    "to_dense",
    "widen",
    "write_dense",
]
