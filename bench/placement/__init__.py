"""A fleet that exists only as numbers, placed by production code: ``python -m bench.placement``.

Nodes and sessions are counts and bytes; what decides where sessions go, what a plan is, and when a
node writes its notice is imported from :mod:`node.placement` and runs as it does in a node and in
``kvnode drain`` and ``kvnode rebalance``. Time is simulated in steps of a third of a lease, and all
chance is drawn from one seed: equal options give equal numbers, except those in wall time.

It does not simulate what a move does on the wire; how long one takes is bytes over rate, and how
long a session has no owner is the tail and the commit that the bench of moves measures.
"""
