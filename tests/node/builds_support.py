"""Nodes that believe to be of different builds, as if each ran on a machine of its own."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from node_support import World, events, move, prompt
from parked_support import StoreWorld

from node.binding import PackBinding
from node.errors import PeerAnswerError

#: Tokens of the prompt, and how many were generated before a session goes anywhere.
PROMPT, TALKED = 40, 3


def numerics_as(numerics, build: str):
    """``numerics`` of the same machine with another MLX."""
    values = {**dict(numerics.values), "mlx": build}
    return dataclasses.replace(numerics, values=tuple(sorted(values.items())))


class Builds(StoreWorld):
    """A world whose nodes are each started as a named build."""

    @contextlib.asynccontextmanager
    async def built(self, name: str, build: str):
        """A running node of that build and a client of it."""
        real = PackBinding.of.__func__

        def of(cls, model, key):
            binding = real(cls, model, key)
            return dataclasses.replace(binding, numerics=numerics_as(binding.numerics, build))

        async with contextlib.AsyncExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch:
                # A binding is made once, when its node starts.
                patch.setattr(PackBinding, "of", classmethod(of))
                node, client = await stack.enter_async_context(self.node(name))
            assert dict(node.moves.binding.numerics.values)["mlx"] == build
            yield node, client


async def talked(client, name="s"):
    """A session in the middle of a conversation."""
    session = await client.append(await client.open(name), prompt(PROMPT))
    await events(client, session, PROMPT, TALKED)
    return await client.get(name)


@contextlib.asynccontextmanager
async def crossed(world: Builds):
    """``(source, its client, target, its client)``: session ``s`` went from build a to build b."""
    async with (
        world.built("source", "a") as (source, giving),
        world.built("target", "b") as (target, taking),
    ):
        result = await move(giving, target, await talked(giving), accept_compatible=True)
        assert result.continuation_verdict == "compatible"
        yield source, giving, target, taking


async def only_compatible(client, node, name="s", **options):
    """Move or copy ``name`` to ``node``: it needs consent, and then it is no more than that."""
    with pytest.raises(PeerAnswerError, match="needs consent"):
        await move(client, node, await client.get(name), **options)
    session = await client.get(name)
    result = await move(client, node, session, accept_compatible=True, **options)
    assert (result.state_verdict, result.continuation_verdict) == ("exact", "compatible")
    return result


__all__ = ["Builds", "World", "crossed", "numerics_as", "only_compatible", "talked"]
