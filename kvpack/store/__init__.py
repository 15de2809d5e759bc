"""The store: sealed chunks, each once, and cuts that refer to them. docs/spec/store-v1.md."""

from kvpack.store.budget import BUDGET_BYTES, FREE_BYTES_MIN, Budget, Usage
from kvpack.store.check import Finding, Severity, check_store
from kvpack.store.cut import StoredCut
from kvpack.store.errors import (
    ConflictError,
    IntentLostError,
    NotStoredError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from kvpack.store.exchange import Trust, export_bundle, import_bundle
from kvpack.store.index import Lookup, Miss, find_deepest
from kvpack.store.interface import ObjectData, ObjectStore, StoredObject
from kvpack.store.listing import ListedCut, cuts_of, list_cuts, release_session
from kvpack.store.local import LocalStore
from kvpack.store.names import Hold, HoldKind
from kvpack.store.opening import open_store
from kvpack.store.peer import Adoption, adopt_chunks, held
from kvpack.store.pin import hold_cut, pinned_cut
from kvpack.store.plan import Drop, GcPlan, GcPolicy, plan_gc
from kvpack.store.reader import CutReader
from kvpack.store.retention import cut_cadence_tokens, cut_positions
from kvpack.store.sweep import GcResult, apply_gc, tidy_store
from kvpack.store.told import ToldStore
from kvpack.store.writer import CutWriter, WriterTools

__all__ = [
    "BUDGET_BYTES",
    "FREE_BYTES_MIN",
    "Adoption",
    "Budget",
    "ConflictError",
    "CutReader",
    "CutWriter",
    "Drop",
    "Finding",
    "GcPlan",
    "GcPolicy",
    "GcResult",
    "Hold",
    "HoldKind",
    "IntentLostError",
    "ListedCut",
    "LocalStore",
    "Lookup",
    "Miss",
    "NotStoredError",
    "ObjectData",
    "ObjectStore",
    "Severity",
    "StoreBusyError",
    "StoreError",
    "StoreFullError",
    "StoredCut",
    "StoredObject",
    "ToldStore",
    "Trust",
    "Usage",
    "WriterTools",
    "adopt_chunks",
    "apply_gc",
    "check_store",
    "cut_cadence_tokens",
    "cut_positions",
    "cuts_of",
    "export_bundle",
    "find_deepest",
    "held",
    "hold_cut",
    "import_bundle",
    "list_cuts",
    "open_store",
    "pinned_cut",
    "plan_gc",
    "release_session",
    "tidy_store",
]
