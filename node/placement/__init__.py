"""Where sessions go: what nodes say of themselves, and pure functions over what they said."""
