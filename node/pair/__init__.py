"""Pairing for people: two terminals, one short code, certificates and pins on both sides.

``agreement`` is the cryptography (no I/O), ``line`` the bounded socket, ``messages`` what is said,
``party`` what a side brings and what it will write, ``talk`` the order of it all, ``console`` the
person. ``docs/spec/pair-v1.md`` is normative.
"""
