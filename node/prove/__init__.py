"""``kvnode prove``: what this machine keeps of the promise, with this model.

The parent plans and judges and never loads MLX. One child process computes what an uninterrupted
session gives and writes its cuts; a second one, started after the first has ended, restores them.
So every restore happens in a fresh process, and weights are in memory once.
"""
