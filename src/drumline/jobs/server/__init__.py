"""The server process: its HTTP API and the requests that it serves."""
