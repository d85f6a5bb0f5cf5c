"""Tensors and gradients in memory and on disk."""

from gradtrail.store.blocks import StoredBlock
from gradtrail.store.cache import TensorCache
from gradtrail.store.facts import BlockRecord, LayerFacts, StoreFacts, records_digest
from gradtrail.store.gradient_store import GradientStore
from gradtrail.store.step_store import StepStore
from gradtrail.store.writer import BackgroundWriter

__all__ = [
    "BackgroundWriter",
    "BlockRecord",
    "GradientStore",
    "LayerFacts",
    "StepStore",
    "StoreFacts",
    "StoredBlock",
    "TensorCache",
    "records_digest",
]
