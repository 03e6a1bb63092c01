"""Quantizers: continuous vectors to codes and ids, behind one interface (`codes.Quantizer`).

`fsq` rounds each channel, `lfq` takes signs, `vq` has a codebook that follows the data, `residual` chains any of them. A config's
`build()` makes the module; models choose by the tagged union `QuantizerConfig`.
"""

from typing import Annotated

from pydantic import Field

from tessera.nn.quantizers.codes import Quantized, Quantizer, code_counts, code_use
from tessera.nn.quantizers.fsq import FSQ, FSQConfig
from tessera.nn.quantizers.lfq import LFQ, LFQConfig
from tessera.nn.quantizers.residual import Residual, ResidualConfig
from tessera.nn.quantizers.vq import VQ, VQConfig

QuantizerConfig = Annotated[FSQConfig | LFQConfig | VQConfig | ResidualConfig, Field(discriminator="kind")]

__all__ = [
    "FSQ",
    "LFQ",
    "VQ",
    "FSQConfig",
    "LFQConfig",
    "Quantized",
    "Quantizer",
    "QuantizerConfig",
    "Residual",
    "ResidualConfig",
    "VQConfig",
    "code_counts",
    "code_use",
]
