"""A second reader of packs, written from docs/spec/kvpack-v1.md alone.

It shares no code with kvpack: what both accept is what the specification says, and where they
differ one of the three is wrong. Section numbers in this folder are those of the specification.
"""
