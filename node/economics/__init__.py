"""What kept rows cost and save: times that this node measured, and nothing else."""
