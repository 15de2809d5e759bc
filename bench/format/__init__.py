"""Measurements of the pack format: speed against bare passes over the same bytes, and memory."""
