"""How long the directory's calls take, by kind of directory."""
