"""Writes the vectors of tests/vectors/v1, from small files with one defect each.

Imports neither kvpack nor tests.reference: whoever wrote the bytes must not be who judges them.
"""
