"""Answers: many requests on few slots, each begun from the deepest state that is held already."""
