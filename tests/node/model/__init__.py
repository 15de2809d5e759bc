"""A model checker over the production state tables: every interleaving of bounded faults."""
