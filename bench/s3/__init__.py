"""What a store in a bucket costs: a restore against a plain download of the same objects."""
