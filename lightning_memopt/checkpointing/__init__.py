"""How one region is treated: recomputed, its inputs packed, its memory respected."""

from lightning_memopt.checkpointing.compressors import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    IntegerSpikeCompressor,
    SparseSpikeCompressor,
    SpikeCompressor,
    SpikePayload,
    Uint8SpikeCompressor,
)
from lightning_memopt.checkpointing.engine import checkpoint
from lightning_memopt.checkpointing.module import (
    checkpoint_module,
    is_checkpointed,
    region_config,
    unwrap_module,
)
from lightning_memopt.checkpointing.region import RegionConfig
from lightning_memopt.checkpointing.state import StateSnapshot, learn_parameters, restore_snapshot, take_snapshot
from lightning_memopt.checkpointing.stores import StateAdapter, register_state_adapter
from lightning_memopt.ops.exactness import NonBinarySpikeError, check_pending_fits

__all__ = [
    "BitSpikeCompressor",
    "BooleanSpikeCompressor",
    "IntegerSpikeCompressor",
    "NonBinarySpikeError",
    "RegionConfig",
    "SparseSpikeCompressor",
    "SpikeCompressor",
    "SpikePayload",
    "StateAdapter",
    "StateSnapshot",
    "Uint8SpikeCompressor",
    "check_pending_fits",
    "checkpoint",
    "checkpoint_module",
    "is_checkpointed",
    "learn_parameters",
    "region_config",
    "register_state_adapter",
    "restore_snapshot",
    "take_snapshot",
    "unwrap_module",
]
