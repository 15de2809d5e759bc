"""How quickly a node is drained, against one stream between the same two processes."""
