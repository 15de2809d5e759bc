"""Stores of 10^3 to 10^6 chunks: what a lookup, a save, a collection and a check cost there."""
