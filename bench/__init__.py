"""What things cost, always beside something else that ran in turns with them.

``python -m bench`` runs everything and writes one JSON; ``python -m bench.table`` makes the table.
"""
