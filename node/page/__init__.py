"""The status page: made on the server as plain HTML, kept fresh by server-sent events."""
