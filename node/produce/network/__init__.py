"""A network of transformers and what it keeps: the one folder that touches torch and transformers.

:mod:`.forward` computes, :mod:`.rows` keeps what was computed and brings it to the host,
:mod:`.weights` reads a folder. Nothing outside of it knows torch.
"""

from __future__ import annotations

from node.produce.network.forward import Network, Placing, versions
from node.produce.network.rows import HostRows, Rows
from node.produce.network.weights import load_tokenizer

__all__ = ["HostRows", "Network", "Placing", "Rows", "load_tokenizer", "versions"]
