"""``kvnode demo``: the main job, end to end, between two real processes."""
