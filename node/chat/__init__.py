"""Conversations as text and token ids: what is asked of a model, and what it answered.

No module here reads a clock, draws a random number or touches a disk; they are functions of their
arguments, apart from the two stores behind :class:`node.chat.transcripts.Transcripts`.
"""
