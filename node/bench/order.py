"""What is to be measured."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.errors import LimitError
from kvpack.layout import CacheLayout
from node.bench.geometry import cut_bytes, read_layout
from node.bench.rows import RowSource, SampleRows
from node.config import Address, ServeConfig
from node.dataplane.options import Plane, PlaneOptions
from node.errors import UsageError

#: Nothing here may be taken over, and no disk is too slow: transfers leave nothing on it.
_PATIENT_S: Final = 60.0


class Kind(enum.Enum):
    """What is moved: a prompt while it is prefilled, or a session that decodes."""

    PROMPT = "prompt"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class BenchOrder:
    """A measurement, checked before anything is started.

    Attributes:
        tokens: Of the prompt, or of the session when it begins to move.
        held_tokens: Whole grid blocks of it that the target holds already.
        kind: Prompt or session.
        layout_name: The reference geometry's name, or a file.
        layout: Shape of the rows.
        stall_s: How long the target stops reading, once, in the middle of the move.
        data_plane: Where chunks travel.
        spools: Whether a target that is started for it writes what arrives to disk, durably.
        rows: A sample of rows that a model computed, for both ends; None for made ones.
        compress: Whether rows are compressed where that saves 3 % or more.
        pushes: Whether pushes and their yardsticks are measured before the move.

    Raises:
        UsageError: The numbers do not go together.
    """

    tokens: int
    held_tokens: int
    kind: Kind
    layout_name: str
    layout: CacheLayout
    stall_s: float = 0.0
    data_plane: Plane = Plane.MTLS
    spools: bool = False
    rows: Path | None = None
    compress: bool = False
    pushes: bool = True

    @classmethod
    def of(
        cls, tokens: int, held_tokens: int, kind: Kind, layout_name: str, stall_s: float
    ) -> BenchOrder:
        """The order that a command line stands for."""
        return cls(tokens, held_tokens, kind, layout_name, read_layout(layout_name), stall_s)

    def __post_init__(self) -> None:
        try:
            cut_bytes(self.layout, self.tokens, self.held_tokens)
        except LimitError as error:
            raise UsageError(f"--tokens, --held: {error}") from error
        if not self.pushes and self.kind is Kind.PROMPT:
            raise UsageError("--without-pushes: a prompt is prefilled at the rate of a push")

    def row_source(self) -> RowSource:
        """What makes the rows.

        Raises:
            KvpackError: The sample does not fit.
        """
        return row_source(self.layout, self.rows)

    @property
    def position(self) -> int:
        """Rows: the boundary token is computed on both ends."""
        return self.tokens - 1


@dataclass(frozen=True, slots=True)
class OtherEnd:
    """Where the target is, and who is asking.

    Attributes:
        address: ``HOST:PORT`` of a ``kvnode bench serve``.
        node: Its name, which is pinned in ``credentials``.
        credentials: This end's credentials folder.
        data_dir: This end's own files.
    """

    address: str
    node: str
    credentials: Path
    data_dir: Path

    @property
    def directory_url(self) -> str:
        """The directory is the other end's: nothing else has to be set up."""
        return f"grpc://{self.node}@{self.address}"


def row_source(layout: CacheLayout, sample: Path | None) -> RowSource:
    """Rows of ``sample``, or made ones.

    Raises:
        KvpackError: The sample is none, or does not fit ``layout``.
    """
    return RowSource(layout) if sample is None else SampleRows(layout, sample)


def bench_config(
    address: Address,
    credentials: Path,
    data_dir: Path,
    directory_url: str,
    *,
    shares: bool,
    planes: PlaneOptions | None = None,
) -> ServeConfig:
    """The configuration of one end. What a slow disk or a paused end would spoil is generous."""
    return ServeConfig(
        address,
        data_dir,
        data_dir,
        credentials,
        directory_url,
        volume_worst_s=_PATIENT_S,
        lease_s=_PATIENT_S,
        share_directory=shares,
        planes=planes,
    )
