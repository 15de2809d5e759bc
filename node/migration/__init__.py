"""Moving a session from node to node. ``docs/spec/migration-v1.md`` is normative.

``table`` holds both state machines as data; ``source`` and ``target`` perform their effects;
``journal`` remembers across restarts; ``wire`` speaks to the other node.
"""
