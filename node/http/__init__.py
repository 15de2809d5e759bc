"""The web door: OpenAI's routes and our own over HTTP. It only translates."""
