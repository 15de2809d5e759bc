"""Stable words of this program, said in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from node.metrics.views import Direction, Standing
from node.serving.health import HealthState
from node.serving.order import MissReason, Rung
from node.serving.slots import SlotState

HEALTH: Final[Mapping[HealthState, str]] = {
    HealthState.OK: "Serving",
    HealthState.LOADING: "Loading the model",
    HealthState.DRAINING: "Draining: finishing answers, taking no new ones",
    HealthState.UNHEALTHY: "Unhealthy: restart this node",
}

SLOTS: Final[Mapping[SlotState, str]] = {
    SlotState.IDLE: "Idle",
    SlotState.BEGIN: "Looking for kept rows",
    SlotState.PREFILL: "Reading the prompt",
    SlotState.DECODE: "Answering",
    SlotState.PAUSED: "Waiting for its reader",
    SlotState.LENT: "Being saved or restored",
}

STANDINGS: Final[Mapping[Standing, str]] = {
    Standing.SERVING: "Ready",
    Standing.HANDING_OVER: "Being handed over",
    Standing.DORMANT: "Asleep on disk",
    Standing.ELSEWHERE: "On another node",
}

#: States of both tables of a move (:mod:`node.migration.table`), as a viewer should read them.
STEPS: Final[Mapping[Direction, Mapping[str, str]]] = {
    Direction.OUT: {
        "idle": "starting",
        "preparing": "asking the other node",
        "streaming": "sending, while it still serves here",
        "sealing": "sent; the other node checks it",
        "reopening": "the link broke; asking what arrived",
        "refilling": "sending again what was lost",
        "committing": "handing over",
        "reading": "asking the directory who owns it",
        "raising": "taking it back",
        "asking": "asking what became of it",
        "kept": "stays here",
        "resumed": "serves here again",
        "released": "handed over",
        "copied": "copied",
    },
    Direction.IN: {
        "none": "starting",
        "open": "receiving",
        "sealed": "everything arrived",
        "probing": "checking the next token",
        "publishing": "writing it to disk",
        "transferring": "taking ownership",
        "unsettled": "waiting for the directory",
        "committed": "lives here now",
        "aborted": "given up",
    },
}

SOURCES: Final[Mapping[str, str]] = {
    Rung.CURRENT.value: "Live state",
    Rung.RESIDENT.value: "Memory",
    Rung.DURABLE.value: "Disk",
    Rung.REMOTE.value: "Another node",
    "computed": "Computed here",
}

MISSES: Final[Mapping[MissReason, str]] = {
    MissReason.NONE: "nothing was missing",
    MissReason.COLD: "never seen before",
    MissReason.INPUT_CHANGED: "the text differs further on",
    MissReason.WINDOW_COLLECTED: "the window at that place was collected",
    MissReason.DAMAGED: "what was kept did not verify",
    MissReason.NUMERICS_CHANGED: "another build had computed it",
    MissReason.CONTEXT_SHIFTED: "older turns were dropped",
    MissReason.DISABLED: "reuse was switched off",
}

#: Reasons of every error class and codes of the web door. One that is missing is said as it is.
REFUSALS: Final[Mapping[str, str]] = {
    "aborted": "The other node gave the move up.",
    "admin_only": "A key was used for something that only an administrator may do.",
    "backend_failed": "A computation failed; nothing of it was kept.",
    "backend_not_repeatable": "The process is set up so that results could not be repeated.",
    "bad_credentials": "The credentials folder is not usable.",
    "bad_key_file": "The tenant's key file is not usable.",
    "bad_model_folder": "The model folder lacks something.",
    "busy": "Too much was asked for at once; the caller may come again soon.",
    "busy_elsewhere": "Another request was under way in that conversation.",
    "cache_discontinuity": "Rows would have been written at a wrong place; nothing was written.",
    "cancelled": "An answer was cancelled.",
    "cannot_listen": "An address could not be bound.",
    "chat_template": "The model's chat template refused the messages.",
    "client_gone": "The client hung up inside its request.",
    "conflict": "A request assumed what is not so any more.",
    "consent_needed": "The other machine computes slightly differently, and nobody consented.",
    "context_length": "A request was longer than the context.",
    "context_length_exceeded": "A request was longer than the context.",
    "context_limit": "A session's context is full.",
    "directory_ambiguous": "The directory did not say whether a change of owner happened.",
    "directory_unavailable": "The directory could not be reached.",
    "directory_went_back": "The directory is older than it was before: adopt it.",
    "draining": "The node is being stopped and takes nothing new.",
    "failure": "Something failed that has no word of its own; the log says more.",
    "fenced": "This node's lease was over, so another may own its sessions.",
    "folder_in_use": "Another process works on the data folder.",
    "identity_mismatch": "It belongs to another model, tokenizer or tenant.",
    "incomplete": "A pack's parent is missing.",
    "intent_lost": "A writer of the store was too slow and has to start again.",
    "invalid_api_key": "A key was wrong or missing.",
    "invalid_json": "A request was no JSON.",
    "invalid_request": "A request could not be understood.",
    "invalid_value": "A request had a value that cannot be.",
    "inventory": "What was sent is not what was announced.",
    "journal_unavailable": "The journal of moves could not be read or written.",
    "layout_mismatch": "It was made for another shape of cache.",
    "lease_live": "The owner is alive, so its session is not to be taken over.",
    "lease_lost": "Another process runs under this node's name.",
    "loading": "The model was still loading.",
    "malformed": "Something stored or sent was malformed.",
    "model_not_found": "A model was asked for that does not run here.",
    "no_tool_call": "A part of an answer was marked as a tool call and is none.",
    "node_failure": "Something of this node's own failed.",
    "not_authentic": "Something stored or sent was not authentic; nothing of it was used.",
    "not_found": "Something was asked for that is not here.",
    "not_paired": "Two machines were not paired.",
    "not_stored": "A stored object is not there.",
    "out_of_memory": "There was not enough memory; nothing of the call was kept.",
    "over_limit": "A number was outside its range.",
    "overloaded": "All places in the queue were taken; the caller may come again soon.",
    "pack_not_found": "A saved session was asked for that is not there.",
    "pairing_refused": "Pairing was stopped: the other side may not be who it says.",
    "peer_refused": "A node is not pinned for what it asked.",
    "peer_unavailable": "Another node did not answer.",
    "previous_response_not_found": "An earlier response was asked for that is not kept here.",
    "producer_check": "The rows that another backend computes are not what the model says.",
    "probe_mismatch": "The first token came out differently, so nothing was installed.",
    "publish_failed": "Something could not be made durable.",
    "record_not_found": "A response or conversation was asked for that is not kept here.",
    "records_full": "A tenant keeps as much as it may.",
    "records_unavailable": "The database of responses and conversations cannot be used.",
    "refused_by_peer": "Another node refused.",
    "replayed": "The number of a transfer was used before.",
    "rows_not_live": "Rows were asked for that are not held any more.",
    "session_exists": "That name is taken.",
    "session_frozen": "The session was being handed over; the caller may come again soon.",
    "session_moved": "The session lives on another node; the caller was told which.",
    "session_not_found": "No session of that name is here.",
    "session_state": "The session could not do that just then.",
    "slow_volume": "The disk is too slow, or refuses writes.",
    "staging_busy": "A context was being rebuilt; the caller may come again soon.",
    "protocol_version": "The other node speaks no version of the protocol that this one does.",
    "stale_token": "The caller did not own the session any more.",
    "stalled_reader": "An answer was ended since nobody read it.",
    "stopped": "This node was stopped meanwhile.",
    "store_away": "The place where cuts are kept did not answer.",
    "store_busy": "The store was busy with something else.",
    "store_denied": "The place where cuts are kept does not let this node in.",
    "store_extra_missing": "What reaches the place where cuts are kept is not installed.",
    "store_failed": "The store of cuts failed.",
    "store_full": "The store of cuts is full.",
    "store_unsafe": "The place where cuts are kept breaks a promise, so nothing is kept there.",
    "torn_generation": "A computation stopped half way: the state in memory is uncertain.",
    "transfer_failed": "A move did not come about.",
    "transfer_not_found": "No transfer of that number is known.",
    "transfer_state": "A message came that does not fit the state of its transfer.",
    "unhealthy": "The state in memory is uncertain: this node must be restarted.",
    "unknown_key": "It was sealed under a key that this node does not have.",
    "unsupported_cache": "The model keeps its state in a way that this program does not know.",
    "unsupported_parameter": "A request had a field that this node cannot follow.",
    "unsupported_version": "It was made by a newer version.",
    "usage": "A command was given something that it cannot work with.",
}


def refusal_words(reason: str) -> str:
    """The sentence of a stable word; a word that has none is said as it stands."""
    return REFUSALS.get(reason) or f"Refused: {reason.replace('_', ' ')}."


def step_words(direction: Direction, step: str) -> str:
    """What a move does, in the words of a viewer."""
    return STEPS[direction].get(step, step)
