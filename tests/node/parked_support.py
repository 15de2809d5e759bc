"""Nodes that may open stores below one folder, and what a session is compared with."""

from __future__ import annotations

import dataclasses

from node_support import World, events, prompt

from node.directory import Ownership
from node.pb.v1 import session_pb2 as pb

#: Tokens of the prompt, and how many were generated before a session is put away.
PROMPT, TALKED = 40, 3


class StoreWorld(World):
    """Every node may open stores below ``stores``."""

    def config(self, name, model_dir=None):
        config = super().config(name, model_dir)
        return dataclasses.replace(config, store_roots=(self.root / "stores",))

    @property
    def store(self) -> str:
        return str(self.root / "stores" / "team")


def order(world, session_id="s", **options) -> pb.RestoreRequest:
    """Take a session out of the one store."""
    return pb.RestoreRequest(session_id=session_id, store=world.store, **options)


async def owner(node, session_id="s") -> str:
    """Who owns the session, says the directory."""
    record = await node.sessions.directory.owner(session_id)
    return record.node if isinstance(record, Ownership) else ""


async def talking(client, session_id="s"):
    """A session in the middle of a conversation."""
    session = await client.append(await client.open(session_id), prompt(PROMPT))
    await events(client, session, PROMPT, TALKED)
    return await client.get(session_id)


async def twin_bits(client, count=12):
    """What a session that never moved says: ``(index, token, logits)``."""
    twin = await client.append(await client.open("twin"), prompt(PROMPT))
    return await events(client, twin, PROMPT, count)


async def bits(client, session_id="s", count=12):
    """The same of ``session_id``, from the prompt on. Logits of old tokens are kept nowhere."""
    return await events(client, await client.get(session_id), PROMPT, count)


def agree(found, expected) -> bool:
    """Equal tokens, and equal logits wherever they were kept."""
    tokens = [one[:2] for one in found] == [one[:2] for one in expected]
    kept = [(a[2], b[2]) for a, b in zip(found, expected, strict=True) if a[2]]
    return tokens and len(kept) > 4 and all(a == b for a, b in kept)


def with_other_numerics(node) -> None:
    """Let the node believe that it computes on another machine."""
    target = node.transfers._target
    (name, _), *rest = target.binding.numerics.values
    numerics = dataclasses.replace(target.binding.numerics, values=((name, "other"), *rest))
    object.__setattr__(target, "binding", dataclasses.replace(target.binding, numerics=numerics))
