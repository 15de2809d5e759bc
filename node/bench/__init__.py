"""``kvnode bench``: measures moves between two processes or machines, over the real path."""
