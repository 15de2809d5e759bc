"""Rows that outlive their session: cuts in a store, their chunks in memory, and the way back.

::

    Trail.cut       copies what the next call overwrites, and nothing else       (between two calls)
    Keeper          reads the rest, seals what is new, publishes the cut         (in the background)
    RowLadder.begin finds the deepest cut of a prompt and brings its rows back

What lies in the store decides what can be begun from. Memory only spares reading it.
"""

from node.serving.ladder.accounts import Accounts
from node.serving.ladder.ladder import RowLadder
from node.serving.ladder.woken import Woken

__all__ = ["Accounts", "RowLadder", "Woken"]
