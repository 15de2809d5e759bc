"""``kvnode produce``: the parts that make a node one that computes with torch."""

from __future__ import annotations

from dataclasses import dataclass

from node.config import ServeConfig
from node.daemon import serve
from node.engine_thread import EngineThread
from node.produce.model import start_engine
from node.server import Fitting


@dataclass(frozen=True, slots=True)
class Order:
    """What the command was told.

    Attributes:
        config: As of any node.
        device: Where to compute, as torch names it; None: CUDA where there is one.
        attention: How transformers attends.
        dtype: Of the rows; None: the weights' own.
        log_level: Of the log on standard error.
        stop_on_stdin_end: Stop also when standard input ends.
    """

    config: ServeConfig
    device: str | None
    attention: str
    dtype: str | None
    log_level: str
    stop_on_stdin_end: bool


def fitting(device: str | None, attention: str, dtype: str | None) -> Fitting:
    """What makes a node one that computes with torch, keeps nothing and takes nothing in."""

    async def load(config: ServeConfig) -> EngineThread:
        # torch and transformers take seconds to import: not before the port is known to be free.
        from node.produce.network import Placing

        return await start_engine(config.model_dir, Placing(device, attention), dtype)

    return Fitting(load=load, spools=False, tier=lambda _config, _binding: None)


def run(order: Order) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        KvpackError: The node could not be started.
    """
    serve(
        order.config,
        stop_on_stdin_end=order.stop_on_stdin_end,
        fitting=fitting(order.device, order.attention, order.dtype),
        log_level=order.log_level,
    )
