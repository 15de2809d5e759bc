"""What a node counts and shows: plain values first, Prometheus only at the moment of a scrape."""
