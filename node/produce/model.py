"""A folder's model as torch computes it: what a node's sessions and moves ask of one."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from engine import chat
from engine.described import DescribedFolder, describe_folder
from kvpack.identity import Identity, NumericsFingerprint
from kvpack.layout import CacheLayout
from node.engine_thread import EngineThread
from node.errors import TransferStateError, UsageError
from node.produce.enrollment import check_rows
from node.produce.generation import TorchGeneration

if TYPE_CHECKING:
    from engine import Model
    from node.produce.network import Network, Placing

#: What the extra brings.
EXTRA: Final = "kvpack[torch]"

_NEEDED: Final = ("torch", "transformers", "safetensors", "jinja2")


def require_torch() -> None:
    """Refuse in one line where torch is not installed, before anything else is looked at.

    Raises:
        UsageError: Names what is missing, and the extra that brings it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--backend transformers: needs {', '.join(missing)}: pip install '{EXTRA}'"
        )


class TorchModel:
    """Stands in for :class:`engine.Model`.

    Args:
        described: The folder.
        network: The same, loaded.
        tokenizer: The same's.
    """

    def __init__(self, described: DescribedFolder, network: Network, tokenizer: Any) -> None:  # noqa: ANN401
        self._described = described
        self._tokenizer = tokenizer
        self.network = network
        template = getattr(tokenizer, "chat_template", None)
        self._identity = described.identity(template)
        self._numerics = NumericsFingerprint(tuple(sorted(network.numerics().items())))

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._described.name

    @property
    def layout(self) -> CacheLayout:
        """Shape of the rows."""
        return self._described.layout

    @property
    def vocab_size(self) -> int:
        """Number of logits; token ids are below it."""
        return self._described.vocab_size

    @property
    def window_tokens(self) -> int:
        """The smallest window of any layer; the whole context where no layer has one."""
        windows = [layer.window_tokens for layer in self.layout.layers]
        return min((w for w in windows if w is not None), default=self.layout.max_context_tokens)

    def identity(self, tenant: str) -> Identity:
        """As MLX's engine states it for the same folder, digest for digest."""
        return dataclasses.replace(self._identity, tenant=tenant)

    def numerics(self) -> NumericsFingerprint:
        """Torch, its versions and its device: equal to no fingerprint of MLX's."""
        return self._numerics

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def new_generation(self) -> TorchGeneration:
        """An empty session."""
        return TorchGeneration(self.network, self.vocab_size)

    def part(self, layers: int, table: Sequence[int]) -> Callable[[], TorchGeneration]:
        """What makes sessions of the first ``layers`` layers in float32, for the check."""
        part = self.network.part(layers, table)
        return lambda: TorchGeneration(part, len(table))

    def installer(self, position: int, *, growing: bool = False) -> NoReturn:
        """Rows leave a producer and never come in.

        Raises:
            TransferStateError: Always.
        """
        raise TransferStateError("this node computes prompts for others: no session can come here")


def load(folder: Path, placing: Placing, dtype: str | None = None) -> TorchModel:
    """Load a model on the calling thread, and check its rows against the reference.

    Args:
        folder: As the other end has it.
        placing: Where it computes.
        dtype: Of the rows; None: the weights' own.

    Raises:
        ModelFolderError: One line naming what is missing, contradictory or not computed here.
        ProducerCheckError: Its rows are not those that the folder says.
        UsageError: The device is not there.
    """
    # Heavy: torch and transformers take seconds.
    from node.produce.network import Network, load_tokenizer

    described = describe_folder(folder, dtype=dtype)
    tokenizer = load_tokenizer(described)
    chat.settle(tokenizer)
    network = Network(described, placing)
    model = TorchModel(described, network, tokenizer)
    check_rows(described, network.weights, model)
    return model


async def start_engine(folder: Path, placing: Placing, dtype: str | None) -> EngineThread:
    """An engine thread that runs the model of ``folder``.

    Raises:
        KvpackError: As for :func:`load`.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
    try:
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(executor, load, folder, placing, dtype)
    except BaseException:
        executor.shutdown(wait=False)
        raise
    return EngineThread(executor, cast("Model", model))
