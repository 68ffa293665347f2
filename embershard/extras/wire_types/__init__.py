"""8-bit types of pooled embeddings and their gradients between ranks: int8 and fp8, with a scale for each row.

`WireTypes` is a sharder's `qcomm_codecs_registry`. `encoding` turns rows into bytes, `exchange` sends them.
"""

from embershard.extras.wire_types.codecs import WireTypes

__all__ = ["WireTypes"]
