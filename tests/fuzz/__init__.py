"""Coverage-guided fuzzing of everything that parses bytes before or without a key."""
