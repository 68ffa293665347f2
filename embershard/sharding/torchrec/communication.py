"""TorchRec's quantized communications: pooled embeddings and their gradients in fewer bits between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from embershard.errors import ConfigError
from embershard.sharding.config import ShardingConfig


def comm_codecs(config: ShardingConfig, device: torch.device) -> Any:
    """Return a sharder's `qcomm_codecs_registry`; None where everything travels as fp32.

    Raises:
        ConfigError: the device's process group cannot send this type.
    """
    for name in ("forward_dtype", "backward_dtype"):
        if device.type == "cpu" and getattr(config, name) == "bf16":  # TorchRec would fall back to fp16
            raise ConfigError(
                f'sharding.{name}: got "bf16", which gloo does not send; on the CPU use "fp16" or "fp32".'
            )
    precisions = QCommsConfig(CommType(config.forward_dtype), CommType(config.backward_dtype))
    return get_qcomm_codecs_registry(precisions, device=device)
